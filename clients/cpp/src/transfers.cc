#include "kvgrpc/transfers.h"

#include <algorithm>
#include <future>
#include <thread>

#include "pause.h"

namespace kvgrpc {
namespace {

// Of one call; half of what a server allows, so that proxies with a limit of a minute let it pass.
constexpr std::chrono::seconds kOneWait(30);

CleanedUp clean_up_side(const CleanUpSide& side, const std::string& message, const CallOptions& options) {
  v1::CancelTransferRequest request;
  if (side.transfer_key.empty()) {
    request.set_transfer_id(side.transfer_id);
  } else {
    request.set_transfer_key(side.transfer_key);
  }
  request.set_message(message);
  for (const auto& id : side.free_allocation_ids) request.add_free_allocation_ids(id);
  try {
    return {side.client.call(&TransferStub::CancelTransfer, request, options), std::nullopt};
  } catch (const Error& error) {
    return {std::nullopt, error};
  }
}

}  // namespace

Waited wait(const Client& client, const std::string& transfer_id, v1::WaitCondition until, Nanoseconds timeout,
            const CallOptions& options) {
  const auto end = Clock::now() + timeout;
  detail::Pause pause;
  while (true) {
    // A server reads 0 as its own longest wait.
    const auto left = std::max<Nanoseconds>(end - Clock::now(), std::chrono::milliseconds(1));
    v1::WaitTransferRequest request;
    request.set_transfer_id(transfer_id);
    request.set_until(until);
    *request.mutable_timeout() = to_duration(std::min<Nanoseconds>(left, kOneWait));
    try {
      auto reply = client.call(&TransferStub::WaitTransfer, request, options);
      if (reply.condition_met() || Clock::now() >= end) {
        return {std::move(*reply.mutable_transfer()), reply.condition_met()};
      }
    } catch (const Error& error) {
      const bool passing = error.code() == grpc::StatusCode::UNAVAILABLE ||
                           error.code() == grpc::StatusCode::DEADLINE_EXCEEDED;
      const auto rest = pause.next(error.retry_delay());
      if (!passing || Clock::now() + rest >= end) throw;
      std::this_thread::sleep_for(rest);
    }
  }
}

std::vector<CleanedUp> clean_up(const std::vector<CleanUpSide>& sides, const std::string& message,
                                const CallOptions& options) {
  std::vector<std::future<CleanedUp>> calls;
  for (const auto& side : sides) {
    calls.push_back(std::async(std::launch::async, clean_up_side, std::cref(side), message, options));
  }
  std::vector<CleanedUp> rows;
  for (auto& call : calls) rows.push_back(call.get());
  return rows;
}

}  // namespace kvgrpc
