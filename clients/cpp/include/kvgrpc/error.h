// The error that this library throws.
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

// A wrong field of a request.
struct FieldViolation {
  std::string field;
  std::string description;
};

// The call that an error belongs to.
struct Called {
  // The called method: "PoolService/AllocateBlocks".
  std::string method = {};
  // The server that was called.
  std::string address = {};
  // Key of the request, if any. The same request with this key retries the call and makes no second one.
  std::string idempotency_key = {};
};

// The error of a call that ended with a status other than OK. It is made from the status and its google.rpc details. A
// status without details, of a proxy or of gRPC itself, has only a code and a message.
class Error : public std::runtime_error {
 public:
  explicit Error(const grpc::Status& status, Called called = {});
  // Makes an error that this side finds by itself.
  Error(grpc::StatusCode code, v1::FailureReason reason, const std::string& message,
        v1::NextStep next = v1::NEXT_STEP_UNSPECIFIED, std::map<std::string, std::string> metadata = {});

  grpc::StatusCode code() const { return code_; }
  // Returns the reason: INTERNAL for a name that this library does not know, UNSPECIFIED where the status names none.
  v1::FailureReason reason() const { return reason_; }
  // Returns the name as it came, even an unknown one: "BLOCK_OUT_OF_RANGE". It is empty where there is none.
  const std::string& reason_name() const { return reason_name_; }
  // Returns the recommended next step. UNSPECIFIED, where the step or the reason is unknown, means no automatic retry.
  v1::NextStep next() const { return next_; }
  const std::string& next_name() const { return next_name_; }
  // Returns the message, one sentence for readers. what() has the code, the reason, the message, the wrong fields and
  // the call.
  const std::string& message() const { return message_; }
  // Returns the engine that refused, and its incarnation below; empty and 0 where nobody stated them.
  const std::string& engine_id() const { return engine_id_; }
  std::uint64_t incarnation() const { return incarnation_; }
  const std::vector<FieldViolation>& violations() const { return violations_; }
  // Returns how long to wait before the same call, where the server stated it.
  std::optional<Nanoseconds> retry_delay() const { return retry_delay_; }
  // Returns what else the reason needs: `phase`, `limit`, `group`, ...
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Returns the call of the error; empty where the error is not of a call.
  const std::string& method() const { return called_.method; }
  const std::string& address() const { return called_.address; }
  const std::string& idempotency_key() const { return called_.idempotency_key; }

  bool is(v1::FailureReason reason) const { return reason_ == reason; }
  // Returns whether the same call may be made again at the same engine, or with another engine in its place.
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

// Returns the name of a code, "UNAVAILABLE", as the specification of gRPC writes it.
std::string name_of(grpc::StatusCode code);

}  // namespace kvgrpc
