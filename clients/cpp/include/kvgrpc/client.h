// The client of one server: its channel, its stubs, and what every call needs.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "kvgrpc/error.h"
#include "kvgrpc/tls.h"
#include "kvgrpc/v1/admin.grpc.pb.h"
#include "kvgrpc/v1/fleet.grpc.pb.h"
#include "kvgrpc/v1/handoff.grpc.pb.h"
#include "kvgrpc/v1/handshake.grpc.pb.h"
#include "kvgrpc/v1/lease.grpc.pb.h"
#include "kvgrpc/v1/pool.grpc.pb.h"
#include "kvgrpc/v1/scheduler.grpc.pb.h"
#include "kvgrpc/v1/tensor.grpc.pb.h"
#include "kvgrpc/v1/transfer.grpc.pb.h"
#include "kvgrpc/values.h"

namespace kvgrpc {

using AdminStub = v1::AdminService::Stub;
using FleetStub = v1::FleetService::Stub;
using HandoffStub = v1::HandoffService::Stub;
using HandshakeStub = v1::HandshakeService::Stub;
using LeaseStub = v1::LeaseService::Stub;
using PoolStub = v1::PoolService::Stub;
using SchedulerStub = v1::SchedulerService::Stub;
using TensorStub = v1::TensorService::Stub;
using TransferStub = v1::TransferService::Stub;

using Metadata = std::multimap<std::string, std::string>;

// The service config of every channel. UNAVAILABLE is retried a few times with growing pauses, and nothing else is.
// Streams are not retried, because only the reader of a stream knows where to resume. ConnectPeer is not retried,
// because it has used its full time by then.
extern const char kServiceConfig[];

// Options of a client.
struct Options {
  // Files of TLS, in place of `credentials`. The client notices within a second of a call that they have changed. It
  // connects with the new files, goes over when that worked, and keeps the connection that it has otherwise.
  std::optional<TlsFiles> tls;
  // Credentials of the channel. Without them and without `tls` the connection is not encrypted.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  // Deadline of a unary call, retries included. The wait of a call that waits at the server is added.
  // ReleaseQuarantine, which waits for the engine's ranks, has at least 60 s.
  Nanoseconds call_timeout = std::chrono::seconds(10);
  // Deadline of ConnectPeer, which is a handshake of two other servers.
  Nanoseconds connect_peer_timeout = std::chrono::seconds(60);
  // Deadline of one stream of a TransferWatch, which then continues with another stream. A dead connection is noticed
  // after this time at the latest.
  Nanoseconds watch_stream_timeout = std::chrono::seconds(60);
  // Silence after which a watched engine counts as unreachable. A server sends a message at least every 5 s.
  Nanoseconds engine_silence = std::chrono::seconds(15);
  // Metadata of every call. Keys are in lower case.
  Metadata metadata;
  // Returns the W3C traceparent of a call, before the call is made. An empty text sends none.
  std::function<std::string()> traceparent;
  // Bearer token that every call carries.
  std::string token;
  // Path of a file with the token, in place of `token`. The file is read again once a second.
  std::string token_file;
};

// Options of one call.
struct CallOptions {
  // Deadline of the call. Unset means the default of the method.
  std::optional<Nanoseconds> timeout;
  // W3C traceparent. An empty text asks Options::traceparent.
  std::string traceparent;
  // Metadata of the call, in addition to the client's own.
  Metadata metadata;
};

namespace detail {

template <class Request, class = void>
struct HasIdempotencyKey : std::false_type {};
template <class Request>
struct HasIdempotencyKey<Request, std::void_t<decltype(std::declval<Request&>().mutable_idempotency_key())>>
    : std::true_type {};

// Returns the default deadline of a method.
template <class Request>
Nanoseconds timeout_of(const Request&, const Options& options) {
  return options.call_timeout;
}
Nanoseconds timeout_of(const v1::WaitTransferRequest& request, const Options& options);
Nanoseconds timeout_of(const v1::WaitTransfersRequest& request, const Options& options);
Nanoseconds timeout_of(const v1::PullBlocksRequest& request, const Options& options);
Nanoseconds timeout_of(const v1::ReserveBlocksRequest& request, const Options& options);
Nanoseconds timeout_of(const v1::PollSchedulerNewsRequest& request, const Options& options);
Nanoseconds timeout_of(const v1::GetTensorRequest& request, const Options& options);
Nanoseconds timeout_of(const v1::PutTensorRequest& request, const Options& options);
Nanoseconds timeout_of(const v1::ConnectPeerRequest& request, const Options& options);
Nanoseconds timeout_of(const v1::ReleaseQuarantineRequest& request, const Options& options);

// One channel with its stubs.
struct Connection {
  explicit Connection(std::shared_ptr<grpc::Channel> made);

  std::shared_ptr<grpc::Channel> channel;
  std::tuple<std::unique_ptr<AdminStub>, std::unique_ptr<FleetStub>, std::unique_ptr<HandoffStub>,
             std::unique_ptr<HandshakeStub>, std::unique_ptr<LeaseStub>, std::unique_ptr<PoolStub>,
             std::unique_ptr<SchedulerStub>, std::unique_ptr<TensorStub>, std::unique_ptr<TransferStub>>
      stubs;
};

// The connection of a client: another one when the files of TLS have changed. Any thread may use it.
class Connections {
 public:
  // Throws std::invalid_argument.
  Connections(std::string address, const Options& options);
  ~Connections();
  // Returns the connection of a call that is made now.
  std::shared_ptr<const Connection> now();

 private:
  struct Files;
  std::shared_ptr<const Connection> open(const std::shared_ptr<grpc::ChannelCredentials>& credentials) const;
  void look();

  const std::string address_;
  std::mutex mutex_;
  std::shared_ptr<const Connection> current_;
  std::shared_ptr<const Connection> next_;  // with the files as they are now; null when the current one has them
  std::unique_ptr<Files> files_;            // null without files
};

}  // namespace detail

// The client of one server. It is a handle: copies share the channel, which lives as long as the last copy. Any thread
// may use it.
class Client {
 public:
  // Makes one unary call:
  //
  //     auto reply = client.call(&kvgrpc::HandoffStub::PullBlocks, request);
  //
  // The call has a deadline, metadata and a trace. It has an idempotency key where the request has the field; a random
  // one where the field is empty. Throws Error.
  template <class Stub, class Request, class Response>
  Response call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*), Request request,
                const CallOptions& options = {}) const {
    if constexpr (detail::HasIdempotencyKey<Request>::value) {
      if (request.idempotency_key().empty()) request.set_idempotency_key(random_key());
    }
    grpc::ClientContext context;
    prepare(context, options, detail::timeout_of(request, this->options()));
    Response response;
    const grpc::Status status = (*stub<Stub>().*method)(&context, request, &response);
    if (!status.ok()) throw Error(status, called(request));
    return response;
  }

  // Returns the generated stub, for streams and asynchronous calls. Prepare their contexts with prepare(). Ask for the
  // stub anew for each call: it goes with one connection.
  template <class Stub>
  std::shared_ptr<Stub> stub() const {
    const auto connection = shared_->connections->now();
    return {connection, std::get<std::unique_ptr<Stub>>(connection->stubs).get()};
  }
  // Gives a context its deadline (that of the options, otherwise `timeout`, otherwise none), metadata and trace.
  void prepare(grpc::ClientContext& context, const CallOptions& options = {},
               std::optional<Nanoseconds> timeout = std::nullopt) const;
  // Gives a context what every call and every stream carries: the token and the metadata of the client.
  void identify(grpc::ClientContext& context) const;

  // Returns the channel of calls that are made now.
  std::shared_ptr<grpc::Channel> channel() const { return shared_->connections->now()->channel; }
  const Options& options() const { return shared_->options; }
  const std::string& address() const { return shared_->address; }

 private:
  friend Client connect(const std::string& address, Options options);

  struct Shared {
    std::string address;
    Options options;
    std::unique_ptr<detail::BearerToken> token;
    std::unique_ptr<detail::Connections> connections;
  };
  // Returns the call that a request makes, for its error.
  Called called(const google::protobuf::Message& request) const;
  explicit Client(std::shared_ptr<const Shared> shared) : shared_(std::move(shared)) {}

  std::shared_ptr<const Shared> shared_;
};

// Returns a client of the server at `address` (`host:port`). It sends nothing before the first call. Throws
// std::invalid_argument for files of TLS and a token that are not usable.
Client connect(const std::string& address, Options options = {});

}  // namespace kvgrpc
