// The one type of error that this library throws.
#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvgrpc/v1/common.pb.h"
#include "kvgrpc/values.h"

namespace kvgrpc {

// One wrong field of a request.
struct FieldViolation {
  std::string field;
  std::string description;
};

// Which call an error is of.
struct Called {
  // What was called: "PoolService/AllocateBlocks".
  std::string method = {};
  // The server that it was called at.
  std::string address = {};
  // Of the request, where it has one: the same request with this key repeats the call, instead of making a second one.
  std::string idempotency_key = {};
};

// A call that ended with another status than OK. Made from the status and its google.rpc details; a status without
// details, of a proxy or of gRPC itself, has a code and a message only.
class Error : public std::runtime_error {
 public:
  explicit Error(const grpc::Status& status, Called called = {});
  // An error that this side finds by itself.
  Error(grpc::StatusCode code, v1::FailureReason reason, const std::string& message,
        v1::NextStep next = v1::NEXT_STEP_UNSPECIFIED, std::map<std::string, std::string> metadata = {});

  grpc::StatusCode code() const { return code_; }
  // Why. INTERNAL for a name that this library does not know, UNSPECIFIED where the status names no reason.
  v1::FailureReason reason() const { return reason_; }
  // The name as it came, also an unknown one: "BLOCK_OUT_OF_RANGE". Empty where there is none.
  const std::string& reason_name() const { return reason_name_; }
  // What would help. UNSPECIFIED, where it or the reason is unknown, means: do not retry by machine.
  v1::NextStep next() const { return next_; }
  const std::string& next_name() const { return next_name_; }
  // One sentence, to be read. what() is code, reason, this, the wrong fields and the call.
  const std::string& message() const { return message_; }
  // Who refused, and in which life; empty and 0 where nobody said.
  const std::string& engine_id() const { return engine_id_; }
  std::uint64_t incarnation() const { return incarnation_; }
  const std::vector<FieldViolation>& violations() const { return violations_; }
  // How long to wait before the same call, where the server stated it.
  std::optional<Nanoseconds> retry_delay() const { return retry_delay_; }
  // What else the reason needs: `phase`, `limit`, `group`, ...
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Which call it was; empty for an error that is no call's.
  const std::string& method() const { return called_.method; }
  const std::string& address() const { return called_.address; }
  const std::string& idempotency_key() const { return called_.idempotency_key; }

  bool is(v1::FailureReason reason) const { return reason_ == reason; }
  // Whether the same call may be made again at the same engine, or with another engine in its place.
  bool may_retry_here() const;
  bool may_retry_elsewhere() const;

 private:
  struct Parts;
  explicit Error(Parts parts);

  grpc::StatusCode code_;
  v1::FailureReason reason_;
  v1::NextStep next_;
  std::string reason_name_;
  std::string next_name_;
  std::string message_;
  std::string engine_id_;
  std::uint64_t incarnation_;
  std::vector<FieldViolation> violations_;
  std::optional<Nanoseconds> retry_delay_;
  std::map<std::string, std::string> metadata_;
  Called called_;
};

// "UNAVAILABLE", as the specification of gRPC writes it.
std::string name_of(grpc::StatusCode code);

}  // namespace kvgrpc
