// The demo's transformer, as in examples/minimal_engine/model.py: equal weights, equal tokens.
//
// KV is stored in float32 and read back from the blocks; all arithmetic is double, which is why another order of sums
// changes no token. It knows positions and block tables, not who filled a block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct Config {
  static constexpr uint32_t layers = 6, hidden_dim = 256, query_heads = 8, kv_heads = 4, head_dim = 32, mlp_dim = 512;
  static constexpr uint32_t vocab_tokens = 258, bos_id = 256, block_tokens = 16;
  static constexpr size_t token_floats = kv_heads * head_dim;
  static constexpr size_t block_bytes = 2 * block_tokens * token_floats * sizeof(float);
  // Digest of everything that determines the weights, by `ModelConfig.weights_revision` of the Python engine.
  static constexpr const char* weights_revision = "393fba709303ee83074396cfd9eea218bdecdc7ef4081fad24fb18343c50f223";
};

// Where the KV of one layer begins: [blocks, 2 (K, V), block_tokens, kv_heads, head_dim].
using Layers = std::vector<float*>;
using Tokens = std::vector<uint32_t>;

Tokens encode(const std::string& text);

class Model {
 public:
  Model();

  // Tokens of one request on their way through the layers.
  struct Pass {
    size_t start;
    std::vector<uint32_t> table;
    std::vector<std::vector<double>> hidden;  // of each token
    uint32_t layers_done = 0;
  };

  // Starts with the tokens from position `start` on; the KV of those before is in the blocks.
  Pass begin(const Tokens& ids, size_t start, const std::vector<uint32_t>& table) const;
  // Computes the next layer, whose KV is then complete.
  void next_layer(Pass& pass, const Layers& kv) const;
  // Returns the token with the largest logit after the last position.
  uint32_t greedy_token(const Pass& pass) const;

 private:
  using Matrix = std::vector<double>;  // [inputs, outputs]
  struct Weights {
    Matrix qkv, out, gate_up, down;
  };

  void attend(const Pass& pass, size_t token, const float* layer, std::vector<double>& query) const;

  Matrix embedding_, head_;
  std::vector<Weights> layers_;
};
