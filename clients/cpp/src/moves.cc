#include "kvgrpc/moves.h"

#include <algorithm>
#include <cctype>

#include "kvgrpc/states.h"

namespace kvgrpc {
namespace {

constexpr std::chrono::seconds kOneWait(30);  // of one call, as in `wait`

// Returns what a transfer that is not over waits for, or its phase.
std::string phase_of(const v1::Transfer& transfer) {
  if (is_over(transfer)) return "return";
  if (transfer.waiting_for() != v1::WAITING_FOR_UNSPECIFIED) {
    std::string name = v1::WaitingFor_Name(transfer.waiting_for());
    name.erase(0, std::min(name.size(), sizeof("WAITING_FOR_") - 1));
    for (char& letter : name) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    return name;
  }
  return transfer.phases().empty() ? "queue" : name_of(transfer.phases().rbegin()->phase());
}

template <class Method, class Request>
v1::Transfer ended(const Client& client, Method method, Request request, Nanoseconds timeout) {
  const auto end = Clock::now() + timeout;
  const auto until = request.wait().until();
  *request.mutable_wait()->mutable_timeout() = to_duration(std::min<Nanoseconds>(timeout, kOneWait));
  auto reply = client.call(method, std::move(request));
  Waited waited{std::move(*reply.mutable_transfer()), reply.condition_met()};
  if (!waited.condition_met) {
    const auto left = std::max<Nanoseconds>(end - Clock::now(), Nanoseconds(0));
    waited = wait(client, waited.transfer.transfer_id(), until, left);
  }
  if (!waited.condition_met) {
    throw Error(grpc::StatusCode::DEADLINE_EXCEEDED, v1::FAILURE_REASON_DEADLINE,
                "the transfer is not done in its time", v1::NEXT_STEP_UNSPECIFIED,
                {{"transfer_id", waited.transfer.transfer_id()}, {"phase", phase_of(waited.transfer)}});
  }
  check(waited.transfer);
  return std::move(waited.transfer);
}

}  // namespace

void check(const v1::Transfer& transfer) {
  if (!is_over(transfer) || has_succeeded(transfer)) return;
  const auto& failure = transfer.failure();
  const bool unstated = failure.reason() == v1::FAILURE_REASON_UNSPECIFIED;
  const auto reason = unstated ? v1::FAILURE_REASON_CANCELLED : known_reason(failure.reason());
  const auto next = reason == failure.reason() ? failure.next() : v1::NEXT_STEP_UNSPECIFIED;
  throw Error(grpc::StatusCode::ABORTED, reason,
              failure.message().empty() ? "the transfer has ended without its KV" : failure.message(), next,
              {{"transfer_id", transfer.transfer_id()}, {"phase", name_of(failure.phase())}});
}

v1::Transfer pull(const Client& client, v1::PullBlocksRequest request, Nanoseconds timeout) {
  return ended(client, &HandoffStub::PullBlocks, std::move(request), timeout);
}

v1::Transfer receive(const Client& client, v1::ReserveBlocksRequest request, Nanoseconds timeout) {
  return ended(client, &HandoffStub::ReserveBlocks, std::move(request), timeout);
}

Moved move(const Client& source, const Client& destination, const v1::Blocks& blocks, const v1::Content& content,
           const Moving& moving) {
  const auto end = Clock::now() + moving.timeout;
  const std::string key = random_bytes(16);
  v1::Blocks into = moving.into.value_or(v1::Blocks());
  std::vector<std::string> allocated;
  if (!moving.into) {
    v1::AllocateBlocksRequest request;
    request.set_request_id(moving.request_id);
    request.set_label("move");
    for (const auto& group : blocks.groups()) {
      auto& row = *request.add_group_block_counts();
      row.set_group(group.group());
      for (const auto count : group.runs().counts()) row.set_block_count(row.block_count() + count);
    }
    into = destination.call(&PoolStub::AllocateBlocks, request).blocks();
    allocated.push_back(into.allocation_id());
  }
  try {
    v1::FinishedBlocksRequest finished;
    finished.set_transfer_key(key);
    finished.set_request_id(moving.request_id);
    auto& job = *finished.mutable_for_readers();
    *job.mutable_blocks() = blocks;
    *job.mutable_content() = content;
    *job.mutable_ttl() = to_duration(moving.timeout);
    const auto handed_over = source.call(&HandoffStub::FinishedBlocks, finished);
    v1::PullBlocksRequest request;
    *request.mutable_grant() = handed_over.grant();
    *request.mutable_content() = content;
    *request.mutable_destination()->mutable_blocks() = into;
    request.set_request_id(moving.request_id);
    const auto left = std::max<Nanoseconds>(end - Clock::now(), std::chrono::milliseconds(1));
    return {pull(destination, std::move(request), left), std::move(into)};
  } catch (...) {  // this includes what the options of a client throw
    clean_up({{source, key, "", {}}, {destination, key, "", allocated}}, "the move failed");
    throw;
  }
}

}  // namespace kvgrpc
