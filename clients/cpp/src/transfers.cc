#include "kvgrpc/transfers.h"

#include <algorithm>
#include <exception>
#include <future>
#include <system_error>
#include <thread>

#include "passing.h"
#include "pause.h"

namespace kvgrpc {
namespace {

// Wait of one call: half of what a server allows, so that proxies with a limit of one minute let it pass.
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
  } catch (const std::exception& error) {  // what the client's options throw when asked for a trace
    return {std::nullopt, Error(grpc::StatusCode::UNKNOWN, v1::FAILURE_REASON_UNSPECIFIED, error.what())};
  } catch (...) {
    return {std::nullopt, Error(grpc::StatusCode::UNKNOWN, v1::FAILURE_REASON_UNSPECIFIED, "no call could be made")};
  }
}

// Runs each side in a thread. A side that gets no thread is told when its row is asked for.
template <class Tell>
std::future<CleanedUp> begun(Tell tell) {
  try {
    return std::async(std::launch::async, tell);
  } catch (const std::system_error&) {
    return std::async(std::launch::deferred, tell);
  }
}

}  // namespace

Waited wait(const Client& client, const std::string& transfer_id, v1::WaitCondition until, Nanoseconds timeout,
            const CallOptions& options) {
  const auto end = Clock::now() + timeout;
  detail::Pause pause;
  while (true) {
    const auto began = Clock::now();
    // When the time is over, a last call follows. With a timeout of zero its answer comes at once.
    const auto once = std::clamp<Nanoseconds>(end - began, Nanoseconds(0), kOneWait);
    Nanoseconds rest{};
    v1::WaitTransferRequest request;
    request.set_transfer_id(transfer_id);
    request.set_until(until);
    *request.mutable_timeout() = to_duration(once);
    try {
      auto reply = client.call(&TransferStub::WaitTransfer, request, options);
      const auto now = Clock::now();
      if (reply.condition_met() || now >= end) {
        return {std::move(*reply.mutable_transfer()), reply.condition_met()};
      }
      if (now - began >= once / 2) {
        pause = {};
        continue;
      }
      // The server did not wait as long as it was asked to. The pause prevents a busy loop.
      rest = pause.next();
    } catch (const Error& error) {
      if (!detail::is_passing(error) || Clock::now() >= end) throw;
      rest = pause.next(error.retry_delay());
    }
    std::this_thread::sleep_until(std::min(Clock::now() + rest, end));
  }
}

std::vector<CleanedUp> clean_up(const std::vector<CleanUpSide>& sides, const std::string& message,
                                const CallOptions& options) {
  std::vector<std::future<CleanedUp>> calls;
  for (const auto& side : sides) {
    calls.push_back(begun([&] { return clean_up_side(side, message, options); }));
  }
  std::vector<CleanedUp> rows;
  for (auto& call : calls) rows.push_back(call.get());
  return rows;
}

}  // namespace kvgrpc
