#include "kvgrpc/steps.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "passing.h"
#include "pause.h"
#include "stream.h"

namespace kvgrpc {
namespace {

using ScheduleStream =
    detail::Stream<grpc::ClientAsyncReaderWriter<v1::ScheduleRequest, v1::ScheduleResponse>, v1::ScheduleResponse>;

// Largest number of times that a step is sent: as often as gRPC sends a unary call that meets UNAVAILABLE.
constexpr int kAttempts = 4;

}  // namespace

class Steps::State {
 public:
  State(Client client, CallOptions options) : client_(std::move(client)), options_(std::move(options)) {}

  v1::ScheduleResponse step(v1::ScheduleRequest request, std::optional<Nanoseconds> timeout) {
    trace(request);
    const auto limit = timeout.value_or(options_.timeout.value_or(client_.options().call_timeout));
    const auto until = Clock::now() + std::min<Nanoseconds>(limit, std::chrono::hours(24 * 365));
    const std::unique_lock turn(turn_, until);
    if (!turn) throw error(grpc::StatusCode::DEADLINE_EXCEEDED, "earlier steps have no answer in its time");
    detail::Pause pause;
    for (int attempt = 1;; ++attempt) {
      try {
        return exchange(request, until);
      } catch (const Error& failed) {
        stream_.reset();  // a late answer to this step must not be taken for the next one's
        const auto rest = pause.next(failed.retry_delay());
        if (attempt == kAttempts || !detail::is_passing(failed) || Clock::now() + rest >= until) throw;
        std::this_thread::sleep_for(rest);
      }
    }
  }

 private:
  v1::ScheduleResponse exchange(const v1::ScheduleRequest& request, Clock::time_point until) {
    if (!stream_) open();
    v1::ScheduleResponse reply;
    auto progress = stream_->write(request, until);
    if (progress == detail::Progress::kDone) progress = stream_->read(reply, until);
    if (progress == detail::Progress::kDone) return reply;
    if (progress == detail::Progress::kTimeout) {
      throw error(grpc::StatusCode::DEADLINE_EXCEEDED, "the step has no answer in its time");
    }
    if (!stream_->status().ok()) throw Error(stream_->status(), called());
    throw error(grpc::StatusCode::UNAVAILABLE, "the server ended the stream of steps");
  }

  // Opens a stream without a trace context: a stream belongs to no request.
  void open() {
    stream_ = std::make_unique<ScheduleStream>(
        [this](grpc::ClientContext& context, grpc::CompletionQueue& queue, void* tag) {
          client_.identify(context);
          for (const auto& [key, value] : options_.metadata) context.AddMetadata(key, value);
          return client_.stub<SchedulerStub>()->AsyncSchedule(&context, &queue, tag);
        });
  }

  void trace(v1::ScheduleRequest& request) const {
    std::string parent = options_.traceparent;
    if (parent.empty() && client_.options().traceparent) parent = client_.options().traceparent();
    if (parent.empty()) return;
    for (auto& call : *request.mutable_calls()) {
      if (!call.has_request_arrived() || !call.request_arrived().traceparent().empty()) continue;
      call.mutable_request_arrived()->set_traceparent(parent);
    }
  }

  Called called() const { return {"SchedulerService/Schedule", client_.address(), ""}; }
  Error error(grpc::StatusCode code, const std::string& message) const {
    return Error(grpc::Status(code, message), called());
  }

  const Client client_;
  const CallOptions options_;
  std::timed_mutex turn_;  // guards the stream
  std::unique_ptr<ScheduleStream> stream_;
};

Steps::Steps(Client client, CallOptions options)
    : state_(std::make_unique<State>(std::move(client), std::move(options))) {}
Steps::Steps(Steps&&) noexcept = default;
Steps& Steps::operator=(Steps&&) noexcept = default;
Steps::~Steps() = default;

v1::ScheduleResponse Steps::step(v1::ScheduleRequest request, std::optional<Nanoseconds> timeout) {
  return state_->step(std::move(request), timeout);
}

}  // namespace kvgrpc
