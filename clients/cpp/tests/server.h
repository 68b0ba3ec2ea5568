// A server that plays kvgrpc in this process, over a real socket. Each test defines its methods.
#pragma once

#include <gtest/gtest.h>
#include <kvgrpc/kvgrpc.h>

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "kvgrpc/client/status_details.pb.h"

namespace kvgrpc::testing {

using namespace std::chrono_literals;
using grpc::ServerContext;
using grpc::Status;
using grpc::StatusCode;

// Time limit that exceeds any test. Reaching it is a failure.
constexpr auto kLong = 20s;

// What one thread leaves for another thread.
template <class T>
class Mailbox {
 public:
  void put(T value) {
    const std::lock_guard lock(mutex_);
    values_.push_back(std::move(value));
    filled_.notify_all();
  }
  T take() {
    std::unique_lock lock(mutex_);
    if (!filled_.wait_for(lock, kLong, [this] { return !values_.empty(); })) throw std::runtime_error("nothing came");
    T value = std::move(values_.front());
    values_.pop_front();
    return value;
  }
  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<T> values_;
};

// Holds a method of the server until the client is gone.
inline Status until_cancelled(ServerContext* context) {
  while (!context->IsCancelled()) std::this_thread::sleep_for(1ms);
  return Status::CANCELLED;
}

inline Status unavailable() { return Status(StatusCode::UNAVAILABLE, "away"); }

inline std::string metadata_of(const ServerContext& context, const std::string& key) {
  std::string found;
  for (const auto& [name, value] : context.client_metadata()) {
    if (name == key) found += std::string(value.data(), value.size());
  }
  return found;
}

inline v1::ResponseHeader header(std::uint64_t event_seq, std::uint64_t incarnation = 7) {
  v1::ResponseHeader made;
  made.set_engine_id("P");
  made.set_event_seq(event_seq);
  made.set_incarnation(incarnation);
  return made;
}

// A status with the details that a kvgrpc server sends.
inline Status refusal(StatusCode code, const std::string& reason, std::map<std::string, std::string> metadata = {},
                      const std::string& domain = "kvgrpc.dev") {
  client::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain(domain);
  info.mutable_metadata()->insert(metadata.begin(), metadata.end());
  client::Status details;
  auto& any = *details.add_details();
  any.set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  any.set_value(info.SerializeAsString());
  return Status(code, "no", details.SerializeAsString());
}

#define KVGRPC_UNARY(method, field)                                                                                  \
  std::function<Status(ServerContext*, const v1::method##Request&, v1::method##Response*)> field;                   \
  Status method(ServerContext* context, const v1::method##Request* request, v1::method##Response* reply) override { \
    return field ? field(context, *request, reply) : Status(StatusCode::UNIMPLEMENTED, #method);                    \
  }
#define KVGRPC_WATCH(method, field)                                                                                    \
  std::function<Status(ServerContext*, const v1::method##Request&, grpc::ServerWriter<v1::method##Response>*)> field; \
  Status method(ServerContext* context, const v1::method##Request* request,                                          \
                grpc::ServerWriter<v1::method##Response>* writer) override {                                         \
    return field ? field(context, *request, writer) : Status(StatusCode::UNIMPLEMENTED, #method);                    \
  }
#define KVGRPC_BIDI(method, field)                                                                          \
  using method##Stream = grpc::ServerReaderWriter<v1::method##Response, v1::method##Request>;               \
  std::function<Status(ServerContext*, method##Stream*)> field;                                             \
  Status method(ServerContext* context, method##Stream* stream) override {                                  \
    return field ? field(context, stream) : Status(StatusCode::UNIMPLEMENTED, #method);                     \
  }

struct Admins : v1::AdminService::Service {
  KVGRPC_UNARY(ReleaseQuarantine, release_quarantine)
};
struct Handoffs : v1::HandoffService::Service {
  KVGRPC_UNARY(FinishedBlocks, finished_blocks)
  KVGRPC_UNARY(PullBlocks, pull_blocks)
};
struct Handshakes : v1::HandshakeService::Service {
  KVGRPC_UNARY(GetCapabilities, get_capabilities)
  KVGRPC_UNARY(CheckCompatibility, check_compatibility)
  KVGRPC_UNARY(ConnectPeer, connect_peer)
  KVGRPC_WATCH(WatchEngine, watch_engine)
};
struct Leases : v1::LeaseService::Service {
  KVGRPC_BIDI(KeepAlive, keep_alive)
};
struct Pools : v1::PoolService::Service {
  KVGRPC_UNARY(AllocateBlocks, allocate_blocks)
  KVGRPC_UNARY(FreeBlocks, free_blocks)
};
struct Schedulers : v1::SchedulerService::Service {
  KVGRPC_UNARY(PollSchedulerNews, poll_scheduler_news)
  KVGRPC_BIDI(Schedule, schedule)
};
struct Transfers : v1::TransferService::Service {
  KVGRPC_UNARY(WaitTransfer, wait_transfer)
  KVGRPC_UNARY(WaitTransfers, wait_transfers)
  KVGRPC_UNARY(CancelTransfer, cancel_transfer)
  KVGRPC_WATCH(WatchTransfers, watch_transfers)
};

#undef KVGRPC_UNARY
#undef KVGRPC_WATCH
#undef KVGRPC_BIDI

class Server {
 public:
  Admins admins;
  Handoffs handoffs;
  Handshakes handshakes;
  Leases leases;
  Pools pools;
  Schedulers schedulers;
  Transfers transfers;

  ~Server() { stop(); }

  // Starts again at its first port, after it was stopped.
  void start() {
    grpc::ServerBuilder builder;
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddListeningPort("127.0.0.1:" + std::to_string(port_), grpc::InsecureServerCredentials(), &port_);
    for (grpc::Service* service : std::initializer_list<grpc::Service*>{&admins, &handoffs, &handshakes, &leases,
                                                                        &pools, &schedulers, &transfers}) {
      builder.RegisterService(service);
    }
    server_ = builder.BuildAndStart();
    if (!server_) throw std::runtime_error("the port is taken");
  }
  // Cuts every call.
  void stop() {
    if (!server_) return;
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
    server_.reset();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// A started server and its client. Methods are set before the first call.
struct WithServer : ::testing::Test {
  Server server;
  WithServer() { server.start(); }
  Client client(Options options = {}) { return connect(server.address(), std::move(options)); }
};

// Returns the error that `body` throws.
template <class Body>
Error error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("no error was thrown");
}

}  // namespace kvgrpc::testing
