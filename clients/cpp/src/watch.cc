#include "kvgrpc/watch.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "passing.h"
#include "pause.h"
#include "stream.h"

namespace kvgrpc {
namespace {

using grpc::StatusCode;

// A stream that another thread may cancel, while it is used or while its user pauses between two streams.
template <class Response>
class Reopened {
 public:
  using Stream = detail::Stream<grpc::ClientAsyncReader<Response>, Response>;

  Stream* get() const { return stream_.get(); }
  Clock::time_point opened() const { return opened_; }

  template <class Start>
  void open(Start start) {
    auto made = std::make_unique<Stream>(std::move(start));
    const std::lock_guard lock(mutex_);
    stream_ = std::move(made);
    opened_ = Clock::now();
    if (cancelled_) stream_->cancel();
  }

  // Ends a stream that failed. Another stream may be opened after the pause.
  void close(const Error& why) {
    pause_.worked(Clock::now() - opened_);
    close(pause_.next(why.retry_delay()));
  }
  void close(Nanoseconds pause) {
    std::unique_ptr<Stream> ended;
    const std::lock_guard lock(mutex_);
    ended = std::move(stream_);
    not_before_ = Clock::now() + pause;
  }

  // Waits for the end of the pause. It returns false when the time was over first.
  bool rest(Clock::time_point until) {
    std::unique_lock lock(mutex_);
    woken_.wait_until(lock, std::min(until, not_before_), [this] { return cancelled_; });
    return Clock::now() >= not_before_;
  }

  void cancel() {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    if (stream_) stream_->cancel();
    woken_.notify_all();
  }

  void check() {
    const std::lock_guard lock(mutex_);
    if (cancelled_) throw Error(StatusCode::CANCELLED, v1::FAILURE_REASON_UNSPECIFIED, "the watch was cancelled");
  }

 private:
  std::mutex mutex_;
  std::condition_variable woken_;
  std::unique_ptr<Stream> stream_;
  bool cancelled_ = false;
  Clock::time_point opened_{};
  Clock::time_point not_before_{};
  detail::Pause pause_;
};

// Returns what a stream ended with. For a watch any end is an error, even the status OK.
Error end_of(const grpc::Status& status, const std::string& method, const Client& client) {
  if (!status.ok()) return Error(status, {method, client.address(), ""});
  return Error(StatusCode::UNAVAILABLE, v1::FAILURE_REASON_UNSPECIFIED, "the server ended the stream");
}

// Returns whether a server will refuse every such watch.
bool is_refusal(const Error& error) {
  return error.code() == StatusCode::INVALID_ARGUMENT || error.code() == StatusCode::UNIMPLEMENTED ||
         error.code() == StatusCode::PERMISSION_DENIED || error.code() == StatusCode::UNAUTHENTICATED;
}

Clock::time_point after(Nanoseconds timeout) {
  return Clock::now() + std::min<Nanoseconds>(timeout, std::chrono::hours(24 * 365));  // otherwise the sum overflows
}

}  // namespace

class TransferWatch::State {
 public:
  State(Client client, v1::TransferFilter filter, WatchPosition after, CallOptions options)
      : client_(std::move(client)), filter_(std::move(filter)), position_(after), options_(std::move(options)) {
    options_.timeout = client_.options().watch_stream_timeout;
  }

  std::optional<v1::WatchTransfersResponse> next(Nanoseconds timeout) {
    const auto until = after(timeout);
    while (true) {
      stream_.check();
      if (!stream_.get()) {
        if (!stream_.rest(until)) {
          stream_.check();
          return std::nullopt;
        }
        open();
      }
      v1::WatchTransfersResponse message;
      switch (stream_.get()->read(message, until)) {
        case detail::Progress::kTimeout:
          return std::nullopt;
        case detail::Progress::kEnded:
          ended(end_of(stream_.get()->status(), "TransferService/WatchTransfers", client_));
          break;
        case detail::Progress::kDone:
          if (take(message)) return message;
      }
    }
  }

  WatchPosition position() const { return position_; }
  std::optional<Error> interruption() const { return interruption_; }
  void cancel() { stream_.cancel(); }

 private:
  void open() {
    stream_.open([this](grpc::ClientContext& context, grpc::CompletionQueue& queue, void* tag) {
      client_.prepare(context, options_);
      v1::WatchTransfersRequest request;
      *request.mutable_filter() = filter_;
      request.set_after_event_seq(position_.event_seq);
      request.set_incarnation(position_.incarnation);
      return client_.stub<TransferStub>()->AsyncWatchTransfers(&context, request, &queue, tag);
    });
  }

  void ended(const Error& why) {
    stream_.check();
    if (!detail::is_passing(why)) {
      stream_.close(why);
      throw why;
    }
    // The end of a stream's time is not a failure, and the next stream needs no pause.
    const bool of_old_age = why.code() == StatusCode::DEADLINE_EXCEEDED &&
                            Clock::now() - stream_.opened() >= client_.options().watch_stream_timeout / 2;
    if (of_old_age && !interruption_) {
      stream_.close(Nanoseconds(0));
    } else {
      stream_.close(why);
      interruption_ = why;
    }
  }

  // Returns whether the reader gets a message. Every message moves the position.
  bool take(const v1::WatchTransfersResponse& message) {
    const auto& header = message.header();
    interruption_.reset();
    if (position_.incarnation != 0 && position_.incarnation != header.incarnation()) {
      stream_.close(Nanoseconds(0));
      throw Error(StatusCode::ABORTED, v1::FAILURE_REASON_INCARNATION_CHANGED,
                  "another life of the engine has begun: what was known of the one before is gone",
                  v1::NEXT_STEP_RECOMPUTE);
    }
    const bool known = position_.incarnation != 0 && header.event_seq() <= position_.event_seq;
    position_ = {std::max(position_.event_seq, header.event_seq()), header.incarnation()};
    return message.history_lost() || (message.has_transfer() && !known);
  }

  const Client client_;
  const v1::TransferFilter filter_;
  WatchPosition position_;
  CallOptions options_;
  Reopened<v1::WatchTransfersResponse> stream_;
  std::optional<Error> interruption_;
};

TransferWatch::TransferWatch(Client client, v1::TransferFilter filter, WatchPosition after, CallOptions options)
    : state_(std::make_unique<State>(std::move(client), std::move(filter), after, std::move(options))) {}
TransferWatch::TransferWatch(TransferWatch&&) noexcept = default;
TransferWatch& TransferWatch::operator=(TransferWatch&&) noexcept = default;
TransferWatch::~TransferWatch() = default;

std::optional<v1::WatchTransfersResponse> TransferWatch::next(Nanoseconds timeout) { return state_->next(timeout); }
WatchPosition TransferWatch::position() const { return state_->position(); }
std::optional<Error> TransferWatch::interruption() const { return state_->interruption(); }
void TransferWatch::cancel() { state_->cancel(); }

class EngineWatch::State {
 public:
  State(Client client, std::optional<Nanoseconds> min_interval, CallOptions options)
      : client_(std::move(client)), options_(std::move(options)) {
    options_.timeout.reset();
    if (min_interval) *request_.mutable_min_interval() = to_duration(*min_interval);
  }

  std::optional<EngineUpdate> next(Nanoseconds timeout) {
    const auto until = after(timeout);
    while (true) {
      stream_.check();
      if (!stream_.get()) {
        if (!stream_.rest(until)) {
          stream_.check();
          return std::nullopt;
        }
        open();
      }
      v1::WatchEngineResponse message;
      const auto began = Clock::now();
      const auto silence_max = client_.options().engine_silence;
      const auto progress = stream_.get()->read(message, std::min(until, began + (silence_max - silence_)));
      silence_ += Clock::now() - began;
      if (progress == detail::Progress::kDone) {
        silence_ = {};
        unreachable_ = false;
        return EngineUpdate{std::move(message), std::nullopt};
      }
      if (progress == detail::Progress::kTimeout && silence_ < silence_max) return std::nullopt;
      const auto update = lost(progress == detail::Progress::kEnded
                                   ? end_of(stream_.get()->status(), "HandshakeService/WatchEngine", client_)
                                   : silent());
      if (update) return update;
    }
  }

  void cancel() { stream_.cancel(); }

 private:
  void open() {
    stream_.open([this](grpc::ClientContext& context, grpc::CompletionQueue& queue, void* tag) {
      client_.prepare(context, options_);
      return client_.stub<HandshakeStub>()->AsyncWatchEngine(&context, request_, &queue, tag);
    });
    silence_ = {};
  }

  static Error silent() {
    return Error(StatusCode::UNAVAILABLE, v1::FAILURE_REASON_UNSPECIFIED, "the engine says nothing");
  }

  // Returns an update only where it is news.
  std::optional<EngineUpdate> lost(const Error& why) {
    stream_.check();
    stream_.close(why);
    if (is_refusal(why)) throw why;
    if (std::exchange(unreachable_, true)) return std::nullopt;
    return EngineUpdate{std::nullopt, why};
  }

  const Client client_;
  v1::WatchEngineRequest request_;
  CallOptions options_;
  Reopened<v1::WatchEngineResponse> stream_;
  // Time since the last message, counted only while next() listens, because messages that came in between are unread.
  Nanoseconds silence_{};
  bool unreachable_ = false;
};

EngineWatch::EngineWatch(Client client, std::optional<Nanoseconds> min_interval, CallOptions options)
    : state_(std::make_unique<State>(std::move(client), min_interval, std::move(options))) {}
EngineWatch::EngineWatch(EngineWatch&&) noexcept = default;
EngineWatch& EngineWatch::operator=(EngineWatch&&) noexcept = default;
EngineWatch::~EngineWatch() = default;

std::optional<EngineUpdate> EngineWatch::next(Nanoseconds timeout) { return state_->next(timeout); }
void EngineWatch::cancel() { state_->cancel(); }

}  // namespace kvgrpc
