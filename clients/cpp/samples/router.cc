// A router that drives one pull between two servers:
//
//     kvgrpc serve --port 50051 &
//     kvgrpc serve --port 50052 &
//     kvgrpc-router 127.0.0.1:50051 127.0.0.1:50052
//
// A router that only relays grants makes none of these calls; see README.md.
#include <kvgrpc/kvgrpc.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

using namespace std::chrono_literals;
namespace v1 = kvgrpc::v1;

namespace {

constexpr auto kPullTime = 90s;  // exceeds the sum of a server's defaults for queue, transfer and settle

// Checks that the two can exchange blocks and lets them connect, so that the first transfer need not wait for that.
// Returns the number of tokens in a block.
std::uint32_t pair(const kvgrpc::Client& p, const kvgrpc::Client& d) {
  const auto source = p.call(&kvgrpc::HandshakeStub::GetCapabilities, v1::GetCapabilitiesRequest());
  const auto destination = d.call(&kvgrpc::HandshakeStub::GetCapabilities, v1::GetCapabilitiesRequest());
  v1::CheckCompatibilityRequest check;
  *check.mutable_engine() = destination.engine();
  const auto verdict = p.call(&kvgrpc::HandshakeStub::CheckCompatibility, check);
  if (!verdict.compatible()) {
    for (const auto& row : verdict.differences()) {
      std::cerr << row.field() << ": " << row.here() << " and " << row.there() << ": " << row.why() << '\n';
    }
    throw std::runtime_error("these engines cannot exchange blocks");
  }
  v1::ConnectPeerRequest connect;
  connect.mutable_peer()->set_address(source.engine().address());
  connect.mutable_peer()->set_engine_id(source.engine().engine_id());
  const auto connected = d.call(&kvgrpc::HandshakeStub::ConnectPeer, connect);
  for (const auto& path : connected.peer().paths()) {
    std::cout << "paired    rank " << path.rank() << " reads rank " << path.peer_rank() << " by "
              << v1::DataPath_Name(path.data_path()) << ": " << path.why() << '\n';
  }
  if (source.engine().pool().groups().empty()) throw std::runtime_error("no engine is attached at P");
  return source.engine().pool().groups(0).block_tokens();
}

v1::Blocks allocate(const kvgrpc::Client& engine, std::uint32_t blocks) {
  v1::AllocateBlocksRequest request;
  auto& row = *request.add_group_block_counts();
  row.set_group(0);
  row.set_block_count(blocks);
  return engine.call(&kvgrpc::PoolStub::AllocateBlocks, request).blocks();
}

void free_blocks(const kvgrpc::Client& engine, const v1::Blocks& blocks) {
  v1::FreeBlocksRequest request;
  request.set_allocation_id(blocks.allocation_id());
  const auto reply = engine.call(&kvgrpc::PoolStub::FreeBlocks, request);
  std::cout << "freed     " << kvgrpc::block_count(reply.freed_blocks()) << " blocks\n";
}

// Watches a transfer until its memory is returned. The watch starts at the point of `made`, the reply that made it.
v1::Transfer follow(const kvgrpc::Client& engine, const v1::PullBlocksResponse& made) {
  v1::Transfer transfer = made.transfer();
  v1::TransferFilter filter;
  filter.add_transfer_ids(transfer.transfer_id());
  kvgrpc::TransferWatch watch(engine, filter, {transfer.event_seq(), made.header().incarnation()});
  const auto end = kvgrpc::Clock::now() + kPullTime;
  while (!kvgrpc::may_reuse_memory(transfer)) {
    const auto change = watch.next(end - kvgrpc::Clock::now());
    if (!change) throw std::runtime_error("the pull takes too long");
    if (change->history_lost()) {
      v1::GetTransferRequest request;
      request.set_transfer_id(transfer.transfer_id());
      transfer = engine.call(&kvgrpc::TransferStub::GetTransfer, request).transfer();
    } else {
      transfer = change->transfer();
    }
    std::cout << "change    " << transfer.event_seq() << ": " << kvgrpc::name_of(transfer.state()) << ", memory "
              << kvgrpc::name_of(kvgrpc::disposition(transfer)) << '\n';
    if (kvgrpc::is_over(transfer) && !kvgrpc::has_succeeded(transfer)) break;
  }
  return transfer;
}

void report(const v1::Transfer& transfer) {
  std::cout << "transfer  " << transfer.transfer_id() << ' ' << kvgrpc::name_of(transfer.state()) << ": "
            << transfer.block_count() << " blocks, " << transfer.moved_bytes() << " bytes, " << transfer.use_tokens()
            << " tokens\n";
  for (const auto& path : transfer.paths()) {
    std::cout << "  path    " << v1::DataPath_Name(path.data_path()) << ": " << path.moved_bytes() << " bytes in "
              << path.descriptor_count() << " descriptors\n";
  }
  for (const auto& phase : transfer.phases()) {
    const std::chrono::duration<double, std::milli> time = kvgrpc::from_duration(phase.duration());
    std::cout << "  phase   " << v1::TransferPhase_Name(phase.phase()) << ' ' << time.count() << " ms\n";
  }
}

// Runs one request as its router sees it.
void run(const kvgrpc::Client& p, const kvgrpc::Client& d, std::uint32_t blocks) {
  const auto block_tokens = pair(p, d);
  std::vector<std::uint32_t> prompt(std::size_t{blocks} * block_tokens);
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<std::uint32_t>(i % 32'000);
  const auto content = kvgrpc::token_content(prompt);
  const auto key = kvgrpc::random_bytes(16);
  std::vector<kvgrpc::CleanUpSide> sides = {{p, key, ""}, {d, key, ""}};
  try {
    const auto source = allocate(p, blocks);
    sides[0].free_allocation_ids = {source.allocation_id()};
    const auto target = allocate(d, blocks);
    sides[1].free_allocation_ids = {target.allocation_id()};

    // P has computed the prompt. Its blocks are pinned under a lease, and P mints the grant to read them.
    v1::FinishedBlocksRequest finished;
    finished.set_transfer_key(key);
    finished.set_request_id("sample");
    *finished.mutable_for_readers()->mutable_blocks() = source;
    *finished.mutable_for_readers()->mutable_content() = content;
    const auto handed_over = p.call(&kvgrpc::HandoffStub::FinishedBlocks, finished);
    std::cout << "finished  " << handed_over.lease().lease_id() << ", a grant of "
              << handed_over.grant().token().size() << " bytes\n";

    // The router relays the grant unread. D pulls with it and states the tokens.
    v1::PullBlocksRequest pull;
    *pull.mutable_grant() = handed_over.grant();
    pull.set_transfer_key(key);
    pull.set_request_id("sample");
    *pull.mutable_content() = content;
    *pull.mutable_destination()->mutable_blocks() = target;
    const auto received = follow(d, d.call(&kvgrpc::HandoffStub::PullBlocks, pull));
    report(received);
    if (!kvgrpc::has_succeeded(received)) throw std::runtime_error("the pull ended: " + received.failure().message());

    // D has told P that its consumer is done. The wait covers the last message between them.
    kvgrpc::wait(p, handed_over.transfer().transfer_id(), v1::WAIT_CONDITION_RETURNED, 5s);
    free_blocks(p, source);
    free_blocks(d, target);
  } catch (const std::exception& error) {
    // Both sides are told, whatever became of the request there. The blocks are freed when nothing uses them any more.
    for (const auto& row : kvgrpc::clean_up(sides, error.what())) {
      std::cerr << "clean-up  " << (row.reply ? kvgrpc::name_of(kvgrpc::outcome(*row.reply)) : row.error->what())
                << '\n';
    }
    throw;
  }
}

std::string hex(const std::string& bytes) {
  std::string text;
  char digits[3];
  for (const char byte : bytes) {
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    text += digits;
  }
  return text;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string prefill = count > 1 ? arguments[1] : "127.0.0.1:50051";
  const std::string decode = count > 2 ? arguments[2] : "127.0.0.1:50052";
  const auto blocks = count > 3 ? std::strtoul(arguments[3], nullptr, 10) : 32;
  // Every call carries the trace context, so that the spans of both servers join the request's trace.
  const std::string traceparent = "00-" + hex(kvgrpc::random_bytes(16)) + "-" + hex(kvgrpc::random_bytes(8)) + "-01";
  std::cout << "trace     " << traceparent << '\n';
  kvgrpc::Options options;
  options.traceparent = [traceparent] { return traceparent; };
  try {
    run(kvgrpc::connect(prefill, options), kvgrpc::connect(decode, options), static_cast<std::uint32_t>(blocks));
  } catch (const std::exception& error) {
    std::cerr << "router: " << error.what() << '\n';
    return 1;
  }
}
