#include "streams.h"

#include <grpcpp/support/sync_stream.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <type_traits>

namespace executor {
namespace {

// Reads a stream into a queue with a thread, because a generated stream has no read with a time limit. `Call` is what
// the stub returns.
template <class Call, class Request, class Response>
class Generated : public Source {
 public:
  template <class Start>
  Generated(const kvgrpc::Client& client, const kvgrpc::CallOptions& options, Start start) : client_(client) {
    client.prepare(context_, options);
    call_ = start(&context_);
    call_->WaitForInitialMetadata();
    reader_ = std::thread([this] { read(); });
  }
  ~Generated() override {
    context_.TryCancel();
    reader_.join();
  }

  std::string metadata() override {
    Struct object;
    for (const auto& [key, value] : context_.GetServerInitialMetadata()) {
      auto& row = (*object.mutable_fields())[std::string(key.data(), key.size())];
      row.set_string_value(std::string(value.data(), value.size()));
    }
    return to_json(object);
  }

  std::string next(kvgrpc::Nanoseconds timeout) override {
    std::unique_lock lock(mutex_);
    const bool news = news_.wait_for(lock, timeout, [this] { return !messages_.empty() || status_; });
    if (!news) return "{\"timeout\":true}";
    if (!messages_.empty()) {
      const Response message = std::move(messages_.front());
      messages_.pop_front();
      return "{\"message\":" + to_json(message) + "}";
    }
    if (!status_->ok()) throw kvgrpc::Error(*status_);
    return "{\"end\":true}";
  }

  void cancel() override { context_.TryCancel(); }

  void send(const Struct& request) override {
    if constexpr (kSends) {
      Request message;
      read_message(request, "request", message);
      const std::lock_guard lock(writing_);
      call_->Write(message);  // after the stream has ended, `next` returns the status
    } else {
      Source::send(request);
    }
  }

  void finish() override {
    if constexpr (kSends) {
      const std::lock_guard lock(writing_);
      call_->WritesDone();
    } else {
      Source::finish();
    }
  }

 private:
  static constexpr bool kSends = !std::is_same_v<Call, grpc::ClientReader<Response>>;

  void read() {
    Response message;
    while (call_->Read(&message)) {
      const std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
      news_.notify_all();
    }
    const grpc::Status status = call_->Finish();
    const std::lock_guard lock(mutex_);
    status_ = status;
    news_.notify_all();
  }

  const kvgrpc::Client client_;
  grpc::ClientContext context_;
  std::unique_ptr<Call> call_;
  std::mutex writing_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<Response> messages_;
  std::optional<grpc::Status> status_;
  std::thread reader_;
};

template <class Stub, class Request, class Response>
std::shared_ptr<Source> open(std::unique_ptr<grpc::ClientReader<Response>> (Stub::*method)(grpc::ClientContext*,
                                                                                          const Request&),
                             const kvgrpc::Client& client, const Struct& fields) {
  Request request;
  read_message(fields, "request", request);
  return std::make_shared<Generated<grpc::ClientReader<Response>, Request, Response>>(
      client, call_options(fields),
      [&](grpc::ClientContext* context) { return (*client.stub<Stub>().*method)(context, request); });
}

template <class Stub, class Request, class Response>
std::shared_ptr<Source> open(
    std::unique_ptr<grpc::ClientReaderWriter<Request, Response>> (Stub::*method)(grpc::ClientContext*),
    const kvgrpc::Client& client, const Struct& fields) {
  return std::make_shared<Generated<grpc::ClientReaderWriter<Request, Response>, Request, Response>>(
      client, call_options(fields),
      [&](grpc::ClientContext* context) { return (*client.stub<Stub>().*method)(context); });
}

class Transfers : public Source {
 public:
  explicit Transfers(kvgrpc::TransferWatch watch) : watch_(std::move(watch)) {}
  std::string next(kvgrpc::Nanoseconds timeout) override {
    const std::lock_guard lock(mutex_);
    const auto message = watch_.next(timeout);
    return message ? "{\"message\":" + to_json(*message) + "}" : "{\"timeout\":true}";
  }
  void cancel() override { watch_.cancel(); }

 private:
  std::mutex mutex_;
  kvgrpc::TransferWatch watch_;
};

class Engine : public Source {
 public:
  explicit Engine(kvgrpc::EngineWatch watch) : watch_(std::move(watch)) {}
  // The protocol has no message for an unreachable engine, so this waits for the next message.
  std::string next(kvgrpc::Nanoseconds timeout) override {
    const std::lock_guard lock(mutex_);
    const auto until = kvgrpc::Clock::now() + timeout;
    while (const auto update = watch_.next(until - kvgrpc::Clock::now())) {
      if (update->message) return "{\"message\":" + to_json(*update->message) + "}";
    }
    return "{\"timeout\":true}";
  }
  void cancel() override { watch_.cancel(); }

 private:
  std::mutex mutex_;
  kvgrpc::EngineWatch watch_;
};

}  // namespace

std::shared_ptr<Source> open_stream(const kvgrpc::Client& client, const std::string& method, const Struct& request) {
  if (method == "kvgrpc.v1.HandshakeService/WatchEngine") {
    return open(&kvgrpc::HandshakeStub::WatchEngine, client, request);
  }
  if (method == "kvgrpc.v1.TransferService/WatchTransfers") {
    return open(&kvgrpc::TransferStub::WatchTransfers, client, request);
  }
  if (method == "kvgrpc.v1.FleetService/WatchEngines") return open(&kvgrpc::FleetStub::WatchEngines, client, request);
  if (method == "kvgrpc.v1.LeaseService/WatchOffers") return open(&kvgrpc::LeaseStub::WatchOffers, client, request);
  if (method == "kvgrpc.v1.LeaseService/KeepAlive") return open(&kvgrpc::LeaseStub::KeepAlive, client, request);
  if (method == "kvgrpc.v1.SchedulerService/Schedule") return open(&kvgrpc::SchedulerStub::Schedule, client, request);
  throw Unable("no stream is called " + method);
}

std::shared_ptr<Source> watch_transfers(const kvgrpc::Client& client, const Struct& request) {
  kvgrpc::v1::TransferFilter filter;
  read_message(request, "filter", filter);
  kvgrpc::WatchPosition after;
  if (find(request, "after")) {
    // A header has both fields, and Protobuf reads numbers that JSON may hold as texts.
    kvgrpc::v1::ResponseHeader header;
    read_message(request, "after", header);
    after = {header.event_seq(), header.incarnation()};
  }
  return std::make_shared<Transfers>(kvgrpc::TransferWatch(client, filter, after, call_options(request)));
}

std::shared_ptr<Source> watch_engine(const kvgrpc::Client& client, const Struct& request) {
  return std::make_shared<Engine>(kvgrpc::EngineWatch(client, std::nullopt, call_options(request)));
}

}  // namespace executor
