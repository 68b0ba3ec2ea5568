// A stream whose operations have time limits, with its own completion queue.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "kvgrpc/error.h"
#include "kvgrpc/values.h"

namespace kvgrpc::detail {

enum class Progress { kDone, kTimeout, kEnded };

// `Call` is what an Async method of a generated stub returns. One thread at a time uses a stream. Any thread may call
// cancel(). An operation that reaches its time limit continues, and the next call of the same method takes it up.
template <class Call, class Response>
class Stream {
 public:
  // `start(context, queue, tag)` prepares the context and calls the stub.
  template <class Start>
  explicit Stream(Start start) {
    pending_[kStart] = true;
    call_ = start(context_, queue_, tag(kStart));
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    context_.TryCancel();
    queue_.Shutdown();
    void* found = nullptr;
    bool ok = false;
    while (queue_.Next(&found, &ok)) {
      // Every operation must leave the queue before its buffers are freed.
    }
  }

  // Reads a message. kDone: `message` is the next one. kEnded: status() has the reason.
  Progress read(Response& message, Clock::time_point until) {
    if (const auto step = started(until); step != Progress::kDone) return step;
    if (!reading_) {
      reading_ = true;
      begin(kRead);
      call_->Read(&incoming_, tag(kRead));
    }
    if (!await(kRead, until)) return Progress::kTimeout;
    if (!ok_[kRead]) return finish(until);
    reading_ = false;
    message = std::move(incoming_);
    return Progress::kDone;
  }

  // Writes a message. kTimeout: give the stream up, because a message may not be replaced while it is written.
  template <class Request>
  Progress write(const Request& message, Clock::time_point until) {
    if (const auto step = started(until); step != Progress::kDone) return step;
    begin(kWrite);
    call_->Write(message, tag(kWrite));
    if (!await(kWrite, until)) return Progress::kTimeout;
    return ok_[kWrite] ? Progress::kDone : finish(until);
  }

  // Returns the status of a stream that has ended.
  const grpc::Status& status() const { return status_; }

  void cancel() { context_.TryCancel(); }

 private:
  enum Operation { kStart, kRead, kWrite, kFinish, kOperations };

  void* tag(Operation operation) { return &pending_[operation]; }
  void begin(Operation operation) { pending_[operation] = true; }

  Progress started(Clock::time_point until) {
    if (!await(kStart, until)) return Progress::kTimeout;
    return ok_[kStart] ? Progress::kDone : finish(until);
  }

  Progress finish(Clock::time_point until) {
    if (!finishing_) {
      finishing_ = true;
      begin(kFinish);
      call_->Finish(&status_, tag(kFinish));
    }
    return await(kFinish, until) ? Progress::kEnded : Progress::kTimeout;
  }

  // Returns whether an operation is done before the time is over. Then ok_ has its result.
  bool await(Operation operation, Clock::time_point until) {
    while (pending_[operation]) {
      void* found = nullptr;
      bool ok = false;
      const auto wall = std::chrono::system_clock::now() + std::chrono::duration_cast<std::chrono::microseconds>(
                                                               std::max<Nanoseconds>(until - Clock::now(), {}));
      if (queue_.AsyncNext(&found, &ok, wall) != grpc::CompletionQueue::GOT_EVENT) return false;
      const auto done = static_cast<std::size_t>(static_cast<bool*>(found) - pending_.data());
      pending_[done] = false;
      ok_[done] = ok;
    }
    return true;
  }

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::array<bool, kOperations> pending_{};
  std::array<bool, kOperations> ok_{};
  bool reading_ = false;
  bool finishing_ = false;
  Response incoming_;
  grpc::Status status_;
  std::unique_ptr<Call> call_;
};

}  // namespace kvgrpc::detail
