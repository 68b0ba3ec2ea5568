#include "engine.h"

#include <time.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace {

constexpr uint32_t kBlocks = 256;

void check(kvgrpc_code code, const kvgrpc_error& error) {
  if (code) throw TransferFailed(std::string(kvgrpc_reason_name(error.reason)) + ": " + error.message);
}

double now_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

kvgrpc_content content(const Tokens& ids) {
  kvgrpc_content made{};
  made.token_ids = ids.data();
  made.token_count = ids.size();
  return made;
}

kvgrpc_labels named(const Labels& labels) {
  kvgrpc_labels made{};
  made.transfer_key = {labels.transfer_key.data(), labels.transfer_key.size()};
  made.request_id = labels.request_id.c_str();
  made.traceparent = labels.traceparent.c_str();
  return made;
}

kvgrpc_blocks named(const std::vector<uint32_t>& table) { return {0, table.data(), table.size()}; }

}  // namespace

Engine::Engine(const std::string& socket_path, bool own_memory) : blocks_(kBlocks) {
  std::iota(blocks_.begin(), blocks_.end(), 0);
  free_ = blocks_;
  const size_t layer_floats = kBlocks * Config::block_bytes / sizeof(float);
  if (socket_path.empty() || own_memory) own_.assign(Config::layers, std::vector<float>(layer_floats));
  if (!socket_path.empty()) attach(socket_path, own_memory);
  float* pool = own_.empty() ? static_cast<float*>(kvgrpc_rank_memory(rank_)) : nullptr;
  for (uint32_t layer = 0; layer < Config::layers; layer++)
    kv_.push_back(pool ? pool + layer * layer_floats : own_[layer].data());
}

void Engine::attach(const std::string& socket_path, bool own_memory) {
  kvgrpc_group group{};
  group.name = "full";
  group.kind = KVGRPC_GROUP_FULL_ATTENTION;
  group.layers = Config::layers;
  group.block_tokens = Config::block_tokens;
  group.blocks = kBlocks;
  group.kv_heads = Config::kv_heads;
  group.head_dim = Config::head_dim;
  group.dtype = "float32";
  group.order = KVGRPC_TOKEN_MAJOR;
  std::vector<kvgrpc_region> regions;
  for (uint32_t layer = 0; layer < Config::layers; layer++) {
    kvgrpc_region region{};
    region.first_layer = layer;
    region.layers = 1;
    region.offset = layer * kBlocks * Config::block_bytes;
    region.stride_bytes = region.block_bytes = Config::block_bytes;
    region.tensor = KVGRPC_TENSOR_KV;
    regions.push_back(region);
  }
  const kvgrpc_pool pool{&group, 1, regions.data(), regions.size(), Config::layers * kBlocks * Config::block_bytes};
  kvgrpc_attach_options options{};
  options.socket_path = socket_path.c_str();
  options.pool = &pool;
  options.weights_revision = Config::weights_revision;
  options.private_memory = own_memory;
  kvgrpc_error error;
  check(kvgrpc_engine_attach(&options, &engine_, &error), error);
  const kvgrpc_ticket* ticket = kvgrpc_engine_ticket(engine_);
  std::vector<kvgrpc_memory> memory;  // The pool's offsets run through the layers.
  for (auto& layer : own_) memory.push_back({layer.data(), layer.size() * sizeof(float)});
  const kvgrpc_code code =
      own_memory ? kvgrpc_rank_attach_memory(ticket, 0, memory.data(), memory.size(), &rank_, &error)
                 : kvgrpc_rank_attach(ticket, 0, &rank_, &error);
  if (code) kvgrpc_engine_close(engine_);
  check(code, error);
  serving_ = std::thread([rank = rank_] { kvgrpc_rank_serve(rank, nullptr); });
}

Engine::~Engine() {
  if (!rank_) return;
  kvgrpc_engine_close(engine_);
  kvgrpc_rank_stop(rank_);
  serving_.join();
  kvgrpc_rank_close(rank_);
}

// ---- blocks

Request Engine::begin(const std::string& prompt) {
  Request request{encode(prompt), {}, 0};
  extend(request);
  return request;
}

void Engine::extend(Request& request) {
  const size_t wanted = (request.ids.size() + Config::block_tokens - 1) / Config::block_tokens;
  if (wanted - std::min(wanted, request.table.size()) > free_.size()) throw TransferFailed("no free blocks");
  while (request.table.size() < wanted) {
    request.table.push_back(free_.back());
    free_.pop_back();
  }
}

void Engine::release(Request& request) {
  free_.insert(free_.end(), request.table.begin(), request.table.end());
  request.table.clear();
}

// ---- the source

void Engine::forward(Request& request, const std::function<void(uint32_t)>& layer_done) {
  auto pass = model_.begin(request.ids, request.have_tokens, request.table);
  for (uint32_t layer = 0; layer < Config::layers; layer++) {
    model_.next_layer(pass, kv_);
    layer_done(layer);
  }
  prefilled_s = now_s();
  request.have_tokens = request.ids.size();
}

Bytes Engine::prefill(Request& request, const Labels& labels, double ttl_s) {
  forward(request, [](uint32_t) {});
  kvgrpc_hand_over_options options{};
  options.ttl_s = ttl_s;
  kvgrpc_transfer made = 0;
  kvgrpc_error error;
  const auto names = named(labels);
  const auto what = content(request.ids);
  const auto blocks = named(request.table);
  check(kvgrpc_hand_over(engine_, &names, &what, &blocks, 1, &options, &made, &error), error);
  transfers_[made].given = std::exchange(request.table, {});
  return wait_for_grant(made);
}

void Engine::push(Request& request, const Labels& labels, const Bytes& grant, bool layerwise) {
  kvgrpc_transfer made = 0;
  kvgrpc_error error;
  const auto names = named(labels);
  const auto what = content(request.ids);
  check(kvgrpc_push(engine_, &names, &what, nullptr, &made, &error), error);
  const kvgrpc_code code = kvgrpc_push_register(engine_, made, {grant.data(), grant.size()}, &error);
  if (code) kvgrpc_cancel(engine_, made, "", nullptr);  // Nothing was sent, so it is over.
  check(code, error);
  Request sent = std::exchange(request, {});  // From here on its blocks come back with the push.
  transfers_[made].given = sent.table;
  const auto blocks = named(sent.table);
  forward(sent, [&](uint32_t layer) {
    const bool last = layer + 1 == Config::layers;
    if (!last && !layerwise) return;
    const kvgrpc_part part{&blocks, 1, layer, layerwise ? 1u : 0u, last, 0};
    check(kvgrpc_push_part(engine_, made, &part, &error), error);
    check(kvgrpc_engine_flush(engine_, &error), error);
  });
}

// ---- the destination

std::string Engine::pull(Request& request, const Labels& labels, const Bytes& grant) {
  kvgrpc_transfer made = 0;
  kvgrpc_error error;
  const auto names = named(labels);
  const auto what = content(request.ids);
  check(kvgrpc_pull(engine_, &names, &what, {grant.data(), grant.size()}, nullptr, &made, &error), error);
  // This engine wants all of the prompt, so it need not wait for KVGRPC_EVENT_OPENED to know how many blocks it takes.
  const auto blocks = named(request.table);
  check(kvgrpc_pull_start(engine_, made, &blocks, 1, 0, 0, &error), error);
  return receive(request, made);
}

kvgrpc_transfer Engine::reserve(const Request& request, const Labels& labels, Bytes& grant) {
  kvgrpc_transfer made = 0;
  kvgrpc_error error;
  const auto names = named(labels);
  const auto what = content(request.ids);
  const auto blocks = named(request.table);
  check(kvgrpc_reserve(engine_, &names, &what, &blocks, 1, nullptr, &made, &error), error);
  grant = wait_for_grant(made);
  transfers_[made].kept = true;
  return made;
}

std::string Engine::receive(Request& request, kvgrpc_transfer transfer) {
  transfers_[transfer].kept = true;
  while (!transfers_[transfer].over) step(1.0);
  const Transfer end = transfers_.extract(transfer).mapped();
  if (!end.received) throw TransferFailed(end.failure);
  request.have_tokens = end.use_tokens;
  return end.id;
}

Tokens Engine::decode(Request& request, size_t count) {
  const size_t prompt_tokens = request.ids.size();
  request.have_tokens = std::min(request.have_tokens, prompt_tokens - 1);
  for (size_t made = 0; made < count; made++) {
    extend(request);
    auto pass = model_.begin(request.ids, request.have_tokens, request.table);
    for (uint32_t layer = 0; layer < Config::layers; layer++) model_.next_layer(pass, kv_);
    request.have_tokens = request.ids.size();
    request.ids.push_back(model_.greedy_token(pass));
  }
  return {request.ids.begin() + static_cast<std::ptrdiff_t>(prompt_tokens), request.ids.end()};
}

void Engine::corrupt(const Request& request) {
  float* block = kv_[0] + request.table.back() * Config::block_bytes / sizeof(float);
  for (size_t i = 0; i < Config::block_bytes / sizeof(float); i++) block[i] = -block[i];
}

// ---- what the lead says

void Engine::step(double timeout_s) {
  kvgrpc_event event;
  kvgrpc_error error;
  for (;; timeout_s = 0) {
    check(kvgrpc_engine_next(engine_, timeout_s, &event, &error), error);
    if (event.kind == KVGRPC_EVENT_NONE) return;
    if (event.transfer) take(event);
  }
}

void Engine::take(const kvgrpc_event& event) {
  Transfer& transfer = transfers_[event.transfer];
  transfer.id = event.transfer_id;
  const auto* grant = static_cast<const uint8_t*>(event.grant.data);
  switch (event.kind) {
    case KVGRPC_EVENT_GRANTED:
      transfer.grant.assign(grant, grant + event.grant.size);
      break;
    case KVGRPC_EVENT_FAILED:
      transfer.failure = std::string(kvgrpc_reason_name(event.failure.reason)) + ": " + event.failure.message;
      break;
    case KVGRPC_EVENT_RECEIVED:
      received_s = now_s();
      transfer.received = transfer.over = true;
      transfer.use_tokens = event.use_tokens;
      break;
    case KVGRPC_EVENT_BLOCKS_RETURNED:
      free_.insert(free_.end(), transfer.given.begin(), transfer.given.end());
      transfer.over = true;
      break;
    default:  // OPENED, LAYERS, PARTS_RETURNED: this engine waits for the whole, and never starts over.
      break;
  }
  if (transfer.over && !transfer.kept) transfers_.erase(event.transfer);
}

Bytes Engine::wait_for_grant(kvgrpc_transfer made) {
  transfers_[made].kept = true;
  while (transfers_[made].grant.empty() && !transfers_[made].over) step(1.0);
  transfers_[made].kept = false;
  if (!transfers_[made].over) return transfers_[made].grant;
  throw TransferFailed(transfers_.extract(made).mapped().failure);
}
