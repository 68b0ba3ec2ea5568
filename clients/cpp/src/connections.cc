// The channel of a client, and the change to another one.
#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <stdexcept>

#include "kvgrpc/client.h"

namespace kvgrpc {
namespace {

constexpr std::chrono::seconds kFilesLook(1);

grpc::ChannelArguments channel_arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(kServiceConfig);
  // Keepalive detects a dead connection in 40 s while calls are open. At most gRPC's default of two pings is sent
  // without data between them, because servers with gRPC's default limits accept that.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  // gRPC's default pause after a refused connection grows to two minutes, and every call in it fails at once. A server
  // that restarts is back in seconds.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  return arguments;
}

bool same(const grpc::SslCredentialsOptions& one, const grpc::SslCredentialsOptions& other) {
  return one.pem_root_certs == other.pem_root_certs && one.pem_private_key == other.pem_private_key &&
         one.pem_cert_chain == other.pem_cert_chain;
}

}  // namespace

namespace detail {

Connection::Connection(std::shared_ptr<grpc::Channel> made)
    : channel(std::move(made)),
      stubs(v1::AdminService::NewStub(channel), v1::FleetService::NewStub(channel),
            v1::HandoffService::NewStub(channel), v1::HandshakeService::NewStub(channel),
            v1::LeaseService::NewStub(channel), v1::PoolService::NewStub(channel),
            v1::SchedulerService::NewStub(channel), v1::TensorService::NewStub(channel),
            v1::TransferService::NewStub(channel)) {}

struct Connections::Files {
  TlsFiles paths;
  grpc::SslCredentialsOptions current;
  grpc::SslCredentialsOptions next;
  std::chrono::steady_clock::time_point looked = std::chrono::steady_clock::now();
};

Connections::Connections(std::string address, const Options& options) : address_(std::move(address)) {
  if (!options.tls) {
    current_ = open(options.credentials ? options.credentials : grpc::InsecureChannelCredentials());
    return;
  }
  if (options.credentials) throw std::invalid_argument("files of TLS and credentials are both given");
  auto content = content_of(*options.tls);
  current_ = open(grpc::SslCredentials(content));
  files_ = std::make_unique<Files>(Files{*options.tls, content, content});
}

Connections::~Connections() = default;

// gRPC 1.51 has a provider of certificates that watches files, too. It drops what it had for files that do not fit
// together, so a client with half of an update would lose its way to the server.
std::shared_ptr<const Connection> Connections::now() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!files_) return current_;
  const auto now = std::chrono::steady_clock::now();
  if (now - files_->looked >= kFilesLook) {
    files_->looked = now;
    look();
  }
  if (!next_) return current_;
  const auto next = next_->channel->GetState(true);
  if (next == GRPC_CHANNEL_READY) {
    current_ = std::move(next_);
    next_ = nullptr;
    files_->current = files_->next;
    return current_;
  }
  const bool connected = current_->channel->GetState(false) == GRPC_CHANNEL_READY;
  return connected || next == GRPC_CHANNEL_TRANSIENT_FAILURE ? current_ : next_;
}

void Connections::look() {
  try {
    auto found = content_of(files_->paths);
    if (same(found, files_->next)) return;
    files_->next = std::move(found);
    next_ = same(files_->next, files_->current) ? nullptr : open(grpc::SslCredentials(files_->next));
  } catch (const std::invalid_argument&) {
    // Who writes the files may be half way. The server says when the last ones no longer do.
  }
}

std::shared_ptr<const Connection> Connections::open(
    const std::shared_ptr<grpc::ChannelCredentials>& credentials) const {
  return std::make_shared<Connection>(grpc::CreateCustomChannel(address_, credentials, channel_arguments()));
}

}  // namespace detail
}  // namespace kvgrpc
