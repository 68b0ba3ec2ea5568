#include "model.h"

#include <algorithm>
#include <cmath>

#include "shake.h"

namespace {

constexpr double kNormEpsilon = 1e-6, kRopeBase = 10'000.0, kScoreDeviation = 4.0;
constexpr uint32_t kHeads = Config::query_heads + 2 * Config::kv_heads;
constexpr uint32_t kHalf = Config::head_dim / 2;
constexpr const char* kSeed = "1";

// Returns a fixed random [inputs, outputs]: uniform draws of 16 bits from a hash stream named by seed and matrix.
std::vector<double> weight(const std::string& name, size_t inputs, size_t outputs, double deviation) {
  const auto draws = shake256(std::string(kSeed) + "/" + name, 2 * inputs * outputs);
  std::vector<double> made(inputs * outputs);
  const double scale = deviation * std::sqrt(3.0) / 32768.0;
  for (size_t i = 0; i < made.size(); i++)
    made[i] = static_cast<int16_t>(draws[2 * i] | draws[2 * i + 1] << 8) * scale;
  return made;
}

std::vector<double> weight(const std::string& name, size_t inputs, size_t outputs) {
  return weight(name, inputs, outputs, 1 / std::sqrt(static_cast<double>(inputs)));
}

std::vector<double> norm(const std::vector<double>& x) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + kNormEpsilon);
  std::vector<double> made(x);
  for (double& value : made) value *= scale;
  return made;
}

std::vector<double> times(const std::vector<double>& x, const std::vector<double>& matrix) {
  const size_t outputs = matrix.size() / x.size();
  std::vector<double> made(outputs, 0.0);
  for (size_t i = 0; i < x.size(); i++) {
    const double* row = &matrix[i * outputs];
    for (size_t j = 0; j < outputs; j++) made[j] += x[i] * row[j];
  }
  return made;
}

// Applies rotary positions to one head; its two halves are pairs.
void rotate(double* head, size_t position) {
  for (uint32_t i = 0; i < kHalf; i++) {
    const double angle = static_cast<double>(position) / std::pow(kRopeBase, 2.0 * i / Config::head_dim);
    const double cosine = std::cos(angle), sine = std::sin(angle), a = head[i], b = head[i + kHalf];
    head[i] = a * cosine - b * sine;
    head[i + kHalf] = a * sine + b * cosine;
  }
}

// Returns where K (0) or V (1) of a position is.
size_t place(const std::vector<uint32_t>& table, size_t position, size_t which) {
  const size_t block = table[position / Config::block_tokens], slot = position % Config::block_tokens;
  return ((block * 2 + which) * Config::block_tokens + slot) * Config::token_floats;
}

}  // namespace

Tokens encode(const std::string& text) {
  Tokens ids{Config::bos_id};
  for (const char character : text) ids.push_back(static_cast<uint8_t>(character));
  return ids;
}

Model::Model()
    : embedding_(weight("embedding", Config::vocab_tokens, Config::hidden_dim, 1.0)),
      head_(weight("head", Config::hidden_dim, Config::vocab_tokens)) {
  for (uint32_t n = 0; n < Config::layers; n++) {
    const std::string name = std::to_string(n);
    layers_.push_back({weight(name + ".qkv", Config::hidden_dim, kHeads * Config::head_dim),
                       weight(name + ".out", Config::query_heads * Config::head_dim, Config::hidden_dim),
                       weight(name + ".gate_up", Config::hidden_dim, 2 * Config::mlp_dim),
                       weight(name + ".down", Config::mlp_dim, Config::hidden_dim)});
  }
}

Model::Pass Model::begin(const Tokens& ids, size_t start, const std::vector<uint32_t>& table) const {
  Pass pass{start, table, {}};
  for (size_t at = start; at < ids.size(); at++) {
    const auto row = embedding_.begin() + static_cast<std::ptrdiff_t>(ids[at] * Config::hidden_dim);
    pass.hidden.emplace_back(row, row + Config::hidden_dim);
  }
  return pass;
}

void Model::attend(const Pass& pass, size_t token, const float* layer, std::vector<double>& query) const {
  const size_t position = pass.start + token;
  std::vector<double> scores(position + 1);
  for (uint32_t head = 0; head < Config::query_heads; head++) {
    double* q = &query[head * Config::head_dim];
    const size_t kv_head = head / (Config::query_heads / Config::kv_heads) * Config::head_dim;
    rotate(q, position);
    for (size_t at = 0; at <= position; at++) {
      const float* key = layer + place(pass.table, at, 0) + kv_head;
      scores[at] = 0;
      for (uint32_t i = 0; i < Config::head_dim; i++)
        scores[at] += q[i] * (kScoreDeviation / std::sqrt(static_cast<double>(Config::head_dim))) * key[i];
    }
    const double most = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& score : scores) sum += score = std::exp(score - most);
    std::fill_n(q, Config::head_dim, 0.0);
    for (size_t at = 0; at <= position; at++) {
      const float* value = layer + place(pass.table, at, 1) + kv_head;
      for (uint32_t i = 0; i < Config::head_dim; i++) q[i] += scores[at] / sum * value[i];
    }
  }
}

void Model::next_layer(Pass& pass, const Layers& kv) const {
  const Weights& weights = layers_[pass.layers_done];
  float* layer = kv[pass.layers_done];
  std::vector<std::vector<double>> queries;
  for (size_t token = 0; token < pass.hidden.size(); token++) {
    auto projected = times(norm(pass.hidden[token]), weights.qkv);
    const size_t position = pass.start + token;
    double *keys = &projected[Config::query_heads * Config::head_dim], *values = keys + Config::token_floats;
    for (uint32_t head = 0; head < Config::kv_heads; head++) rotate(keys + head * Config::head_dim, position);
    std::copy_n(keys, Config::token_floats, layer + place(pass.table, position, 0));
    std::copy_n(values, Config::token_floats, layer + place(pass.table, position, 1));
    projected.resize(Config::query_heads * Config::head_dim);
    queries.push_back(std::move(projected));
  }
  for (size_t token = 0; token < pass.hidden.size(); token++) {
    auto& hidden = pass.hidden[token];
    attend(pass, token, layer, queries[token]);
    const auto mixed = times(queries[token], weights.out);
    for (size_t i = 0; i < hidden.size(); i++) hidden[i] += mixed[i];
    auto both = times(norm(hidden), weights.gate_up);
    for (uint32_t i = 0; i < Config::mlp_dim; i++)
      both[i] = both[i] / (1 + std::exp(-both[i])) * both[i + Config::mlp_dim];
    both.resize(Config::mlp_dim);
    const auto down = times(both, weights.down);
    for (size_t i = 0; i < hidden.size(); i++) hidden[i] += down[i];
  }
  pass.layers_done++;
}

uint32_t Model::greedy_token(const Pass& pass) const {
  const auto logits = times(norm(pass.hidden.back()), head_);
  // Random weights never end a text, and it is shown on a terminal: only printable ASCII.
  const auto first = logits.begin() + ' ', last = logits.begin() + '~' + 1;
  return static_cast<uint32_t>(std::max_element(first, last) - logits.begin());
}
