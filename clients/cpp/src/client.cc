#include "kvgrpc/client.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>

namespace kvgrpc {
namespace {

constexpr std::chrono::seconds kLongestWait(60);  // of one call, at any server
// Default wait of PutTensor, which returns when its consumers have the tensor. Without a timeout in the request the
// server waits two minutes. A stated timeout is limited to the longest life of a lease.
constexpr std::chrono::seconds kPutTensor(120);
constexpr std::chrono::seconds kLongestPutTensor(600);
// Shortest deadline of ReleaseQuarantine. The call is over when every rank has begun its data paths again.
constexpr std::chrono::seconds kReleaseQuarantine(60);

// Returns the wait that a request asks for, as the server reads it.
Nanoseconds wait_of(bool stated, const google::protobuf::Duration& wait, Nanoseconds unset,
                    Nanoseconds longest = kLongestWait) {
  return stated ? std::clamp<Nanoseconds>(from_duration(wait), Nanoseconds(0), longest) : unset;
}

}  // namespace

const char kServiceConfig[] = R"({
  "methodConfig": [
    {
      "name": [{}],
      "waitForReady": false,
      "retryPolicy": {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": ["UNAVAILABLE"]
      }
    },
    {
      "name": [
        {"service": "kvgrpc.v1.HandshakeService", "method": "ConnectPeer"},
        {"service": "kvgrpc.v1.HandshakeService", "method": "WatchEngine"},
        {"service": "kvgrpc.v1.TransferService", "method": "WatchTransfers"},
        {"service": "kvgrpc.v1.LeaseService", "method": "KeepAlive"},
        {"service": "kvgrpc.v1.CallService", "method": "StreamCalls"},
        {"service": "kvgrpc.v1.SchedulerService", "method": "Schedule"}
      ],
      "waitForReady": false
    }
  ]
})";

namespace {

// Returns how long a call itself waits; 0 where it does not wait.
template <typename Request>
Nanoseconds wait_in_call(const Request& request) {
  if (!request.has_wait()) return Nanoseconds(0);
  return wait_of(request.wait().has_timeout(), request.wait().timeout(), kLongestWait);
}

}  // namespace

namespace detail {

Nanoseconds timeout_of(const v1::WaitTransferRequest& request, const Options& options) {
  return wait_of(request.has_timeout(), request.timeout(), kLongestWait) + options.call_timeout;
}

Nanoseconds timeout_of(const v1::WaitTransfersRequest& request, const Options& options) {
  return wait_of(request.has_timeout(), request.timeout(), kLongestWait) + options.call_timeout;
}

Nanoseconds timeout_of(const v1::PullBlocksRequest& request, const Options& options) {
  return wait_in_call(request) + options.call_timeout;
}

Nanoseconds timeout_of(const v1::ReserveBlocksRequest& request, const Options& options) {
  return wait_in_call(request) + options.call_timeout;
}

Nanoseconds timeout_of(const v1::PollSchedulerNewsRequest& request, const Options& options) {
  return wait_of(request.has_wait(), request.wait(), Nanoseconds(0)) + options.call_timeout;
}

Nanoseconds timeout_of(const v1::GetTensorRequest& request, const Options& options) {
  return wait_of(request.has_timeout(), request.timeout(), kLongestWait) + options.call_timeout;
}

Nanoseconds timeout_of(const v1::PutTensorRequest& request, const Options& options) {
  return wait_of(request.has_timeout(), request.timeout(), kPutTensor, kLongestPutTensor) + options.call_timeout;
}

Nanoseconds timeout_of(const v1::ConnectPeerRequest&, const Options& options) { return options.connect_peer_timeout; }

Nanoseconds timeout_of(const v1::ReleaseQuarantineRequest&, const Options& options) {
  return std::max<Nanoseconds>(options.call_timeout, kReleaseQuarantine);
}

}  // namespace detail

void Client::identify(grpc::ClientContext& context) const {
  const std::string authorization = shared_->token->authorization();
  if (!authorization.empty()) context.AddMetadata("authorization", authorization);
  for (const auto& [key, value] : options().metadata) context.AddMetadata(key, value);
}

void Client::prepare(grpc::ClientContext& context, const CallOptions& call,
                     std::optional<Nanoseconds> timeout) const {
  if (call.timeout) timeout = call.timeout;
  // gRPC takes deadlines by the system's clock. This one is counted from now.
  if (timeout) {
    const auto span = std::min<Nanoseconds>(*timeout, std::chrono::hours(24 * 365));  // otherwise the sum overflows
    context.set_deadline(std::chrono::system_clock::now() + span);
  }
  identify(context);
  for (const auto& [key, value] : call.metadata) context.AddMetadata(key, value);
  std::string trace = call.traceparent;
  if (trace.empty() && options().traceparent) trace = options().traceparent();
  if (!trace.empty()) context.AddMetadata("traceparent", trace);
}

Called Client::called(const google::protobuf::Message& request) const {
  const auto* type = request.GetDescriptor();
  Called made{type->name(), address(), ""};
  const auto* file = type->file();
  for (int i = 0; i < file->service_count(); ++i) {
    const auto* service = file->service(i);
    for (int k = 0; k < service->method_count(); ++k) {
      // Every method has its own request type.
      if (service->method(k)->input_type() == type) made.method = service->name() + "/" + service->method(k)->name();
    }
  }
  const auto* key = type->FindFieldByName("idempotency_key");
  if (key) made.idempotency_key = request.GetReflection()->GetString(request, key);
  return made;
}

Client connect(const std::string& address, Options options) {
  auto shared = std::make_shared<Client::Shared>();
  shared->address = address;
  shared->token = std::make_unique<detail::BearerToken>(options.token, options.token_file);
  shared->connections = std::make_unique<detail::Connections>(address, options);
  shared->options = std::move(options);
  return Client(std::move(shared));
}

}  // namespace kvgrpc
