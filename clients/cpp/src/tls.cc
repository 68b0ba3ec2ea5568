#include "kvgrpc/tls.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <mutex>
#include <stdexcept>

namespace kvgrpc {
namespace {

constexpr std::chrono::seconds kTokenLook(1);

std::string text_in(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad()) throw std::invalid_argument(path + " cannot be read");
  return content;
}

std::string pem_of(const std::string& path) {
  std::string content = text_in(path);
  const bool whole = content.find("-----BEGIN ") != std::string::npos && content.find("-----END ") != std::string::npos;
  if (!whole) throw std::invalid_argument(path + " holds no PEM");
  return content;
}

// Returns the authorization with this token. The error does not show the token.
std::string authorization_of(const std::string& token) {
  const bool fits = std::all_of(token.begin(), token.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (token.empty() || !fits) throw std::invalid_argument("a token is one word of printable ASCII");
  return "Bearer " + token;
}

std::string authorization_in(const std::string& path) {
  const std::string content = text_in(path);
  const char* space = " \t\r\n";
  const auto first = content.find_first_not_of(space);
  if (first == std::string::npos) return authorization_of("");
  return authorization_of(content.substr(first, content.find_last_not_of(space) - first + 1));
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> tls_credentials(const TlsFiles& files) {
  return grpc::SslCredentials(detail::content_of(files));
}

namespace detail {

grpc::SslCredentialsOptions content_of(const TlsFiles& files) {
  const auto path = [&](const std::string& own, const char* name) {
    return !own.empty() || files.dir.empty() ? own : files.dir + "/" + name;
  };
  const std::string cert = path(files.cert, "tls.crt"), key = path(files.key, "tls.key"), ca = path(files.ca, "ca.crt");
  if (ca.empty()) throw std::invalid_argument("the CAs that sign servers have no path");
  if (cert.empty() != key.empty()) throw std::invalid_argument("a certificate and its key need a path each");
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = pem_of(ca);
  if (!cert.empty()) {
    options.pem_cert_chain = pem_of(cert);
    options.pem_private_key = pem_of(key);
  }
  return options;
}

struct BearerToken::State {
  std::string file;
  std::mutex mutex;
  std::string authorization;
  std::chrono::steady_clock::time_point looked = std::chrono::steady_clock::now();
};

BearerToken::BearerToken(const std::string& token, std::string file) : state_(std::make_unique<State>()) {
  if (!token.empty() && !file.empty()) throw std::invalid_argument("a token and a file of one are both given");
  if (!token.empty()) state_->authorization = authorization_of(token);
  if (!file.empty()) state_->authorization = authorization_in(file);
  state_->file = std::move(file);
}

BearerToken::~BearerToken() = default;

std::string BearerToken::authorization() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto now = std::chrono::steady_clock::now();
  if (!state_->file.empty() && now - state_->looked >= kTokenLook) {
    state_->looked = now;
    try {
      state_->authorization = authorization_in(state_->file);
    } catch (const std::invalid_argument&) {
      // The server says when the last token no longer does.
    }
  }
  return state_->authorization;
}

}  // namespace detail
}  // namespace kvgrpc
