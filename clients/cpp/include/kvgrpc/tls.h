// Credentials of a client from files: TLS, and a token.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

namespace kvgrpc {

// Paths of PEM files for TLS. A path of its own stands in place of the folder's file. With `ca` alone the client checks
// the server and shows no certificate.
struct TlsFiles {
  std::string dir;   // folder with tls.crt, tls.key and ca.crt, as Kubernetes and cert-manager name them
  std::string cert;  // path of the client's certificate chain
  std::string key;   // path of the client's key
  std::string ca;    // path of the CAs that sign servers
};

// Returns the credentials of a channel, with the files as they are now, for channels of your own: a client takes the files
// as Options::tls and notices changes. Throws std::invalid_argument for files that are not there, and for a certificate
// without a key.
std::shared_ptr<grpc::ChannelCredentials> tls_credentials(const TlsFiles& files);

namespace detail {

// Returns what the files hold now. Throws std::invalid_argument.
grpc::SslCredentialsOptions content_of(const TlsFiles& files);

// The token of a client. Any thread may use it.
class BearerToken {
 public:
  // One of both may be empty; without either there is no token. Throws std::invalid_argument for a token that no call
  // can carry, and for a file that cannot be read.
  BearerToken(const std::string& token, std::string file);
  ~BearerToken();
  // Returns the metadata of a call that is made now, or an empty text. The file is read again once a second. A file
  // that became unusable leaves the last token, because who writes the file may be half way.
  std::string authorization() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace detail
}  // namespace kvgrpc
