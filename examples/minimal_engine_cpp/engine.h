// The demo's engine in C++ on kvgrpc: all that an engine adds to serve as prefill or decode side, or both.
//
// It is a scheduler and a worker in one process, like examples/minimal_engine/engine.py. Its pool is memory that the lead
// made, or its own, which its rank moves. The engine gives out the blocks, and those that a transfer has come back with
// its last event.
#pragma once

#include <kvgrpc_engine.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "model.h"

struct TransferFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Request {
  Tokens ids;
  std::vector<uint32_t> table;
  size_t have_tokens = 0;  // whose KV is in the table
};

// The router's names of a transfer.
struct Labels {
  std::string transfer_key, request_id, traceparent;
};

using Bytes = std::vector<uint8_t>;

class Engine {
 public:
  // Attaches at a session socket, with memory of its own or the lead's; without a socket it only computes.
  Engine(const std::string& socket_path, bool own_memory);
  ~Engine();
  Engine(const Engine&) = delete;

  Request begin(const std::string& prompt);
  void release(Request& request);
  size_t used_blocks() const { return blocks_.size() - free_.size(); }

  // Computes a prompt and hands it over. Returns the grant. The blocks are the transfer's.
  Bytes prefill(Request& request, const Labels& labels, double ttl_s);
  // Computes a prompt and pushes it to where the grant says, whole or layer by layer. The blocks are the transfer's.
  void push(Request& request, const Labels& labels, const Bytes& grant, bool layerwise);
  // Pulls a prompt's KV. Returns the transfer's name. Throws TransferFailed: the request has its blocks again.
  std::string pull(Request& request, const Labels& labels, const Bytes& grant);
  // Reserves the request's blocks for a push, and returns the grant for its source.
  kvgrpc_transfer reserve(const Request& request, const Labels& labels, Bytes& grant);
  // Waits until a reservation is filled. Returns the transfer's name. Throws TransferFailed, as `pull` does.
  std::string receive(Request& request, kvgrpc_transfer reservation);
  // Returns greedy tokens after the prompt; they join the request.
  Tokens decode(Request& request, size_t count);

  // Changes the last block: a comparison of tokens must notice.
  void corrupt(const Request& request);

  // Takes in what happened; an engine does this once in each of its steps.
  void step(double timeout_s = 0);
  int fileno() const { return engine_ ? kvgrpc_engine_fileno(engine_) : -1; }

  double prefilled_s = 0, received_s = 0;

 private:
  void attach(const std::string& socket_path, bool own_memory);
  void extend(Request& request);
  void forward(Request& request, const std::function<void(uint32_t)>& layer_done);

  // What the lead said of one transfer.
  struct Transfer {
    bool kept = false;            // It is asked about after its end.
    std::vector<uint32_t> given;  // Blocks that come back with its end.
    Bytes grant;
    std::string id, failure;
    bool received = false, over = false;
    uint32_t use_tokens = 0;
  };
  Bytes wait_for_grant(kvgrpc_transfer made);
  void take(const kvgrpc_event& event);

  Model model_;
  std::vector<uint32_t> blocks_, free_;
  std::vector<std::vector<float>> own_;  // the layers of a pool that no lead made
  Layers kv_;
  kvgrpc_engine* engine_ = nullptr;
  kvgrpc_rank* rank_ = nullptr;
  std::thread serving_;
  std::map<kvgrpc_transfer, Transfer> transfers_;
};
