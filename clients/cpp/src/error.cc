#include "kvgrpc/error.h"

#include <array>

#include "kvgrpc/client/status_details.pb.h"
#include "kvgrpc/states.h"

namespace kvgrpc {
namespace {

constexpr char kDomain[] = "kvgrpc.dev";

// Takes a value out of the metadata, because a value with its own field is not reported twice.
std::string take(std::map<std::string, std::string>& metadata, const std::string& key) {
  const auto node = metadata.extract(key);
  return node ? node.mapped() : "";
}

std::uint64_t to_number(const std::string& digits) {
  std::uint64_t number = 0;
  for (const char digit : digits) {
    if (digit < '0' || digit > '9') return 0;
    number = number * 10 + static_cast<std::uint64_t>(digit - '0');
  }
  return number;
}

}  // namespace

struct Error::Parts {
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  std::string message = {};
  std::string reason_name = {};
  std::string next_name = {};
  std::string engine_id = {};
  std::uint64_t incarnation = 0;
  std::vector<FieldViolation> violations = {};
  std::optional<Nanoseconds> retry_delay = {};
  std::map<std::string, std::string> metadata = {};
  Called called = {};

  static Parts of(const grpc::Status& status, Called called) {
    Parts parts;
    parts.called = std::move(called);
    parts.code = status.error_code();
    parts.message = status.error_message();
    client::Status details;
    if (!details.ParseFromString(status.error_details())) return parts;
    for (const auto& detail : details.details()) parts.read(detail);
    parts.say_once();
    return parts;
  }

  // Removes the reason and the violations from the message. A server adds both for tools that show nothing else.
  void say_once() {
    const std::string repeated = reason_name + ": ";
    if (!reason_name.empty() && message.rfind(repeated, 0) == 0) message.erase(0, repeated.size());
    for (const auto& violation : violations) {
      if (message.rfind(violation.field + ": " + violation.description, 0) == 0) {
        message = violation.description;
        return;
      }
    }
    if (violations.empty()) return;
    const auto said = message.find("; " + violations[0].field + ": ");
    if (said != std::string::npos) message.erase(said);
  }

  // The name in the type URL decides, not Any::UnpackTo, because the messages have other full names here.
  void read(const google::protobuf::Any& detail) {
    const std::string type = detail.type_url().substr(detail.type_url().rfind('/') + 1);
    if (type == "google.rpc.ErrorInfo") {
      client::ErrorInfo info;
      if (!info.ParseFromString(detail.value()) || info.domain() != kDomain) return;
      reason_name = info.reason();
      metadata.insert(info.metadata().begin(), info.metadata().end());
      next_name = take(metadata, "next");
      engine_id = take(metadata, "engine_id");
      incarnation = to_number(take(metadata, "incarnation"));
    } else if (type == "google.rpc.BadRequest") {
      client::BadRequest bad;
      if (!bad.ParseFromString(detail.value())) return;
      for (const auto& row : bad.field_violations()) violations.push_back({row.field(), row.description()});
    } else if (type == "google.rpc.RetryInfo") {
      client::RetryInfo retry;
      if (retry.ParseFromString(detail.value())) retry_delay = from_duration(retry.retry_delay());
    }
  }

  std::string sentence() const {
    std::string text = name_of(code);
    if (!reason_name.empty()) text += " " + reason_name;
    text += ": ";
    for (const auto& violation : violations) {
      if (violation.description == message) text += violation.field + ": ";
    }
    text += message;
    for (const auto& violation : violations) {
      if (violation.description != message) text += "; " + violation.field + ": " + violation.description;
    }
    if (!called.method.empty()) text += " (" + called.method + " at " + called.address + ")";
    return text;
  }

  v1::FailureReason reason() const {
    v1::FailureReason value = v1::FAILURE_REASON_UNSPECIFIED;
    if (reason_name.empty()) return value;
    return v1::FailureReason_Parse("FAILURE_REASON_" + reason_name, &value) ? value : v1::FAILURE_REASON_INTERNAL;
  }

  v1::NextStep next() const {
    v1::NextStep value = v1::NEXT_STEP_UNSPECIFIED;
    // The next step for a reason that is unknown here must not be taken, whatever it is.
    if (name_of(reason()) == reason_name) v1::NextStep_Parse("NEXT_STEP_" + next_name, &value);
    return value;
  }
};

Error::Error(Parts parts)
    : std::runtime_error(parts.sentence()),
      code_(parts.code),
      reason_(parts.reason()),
      next_(parts.next()),
      reason_name_(std::move(parts.reason_name)),
      next_name_(std::move(parts.next_name)),
      message_(std::move(parts.message)),
      engine_id_(std::move(parts.engine_id)),
      incarnation_(parts.incarnation),
      violations_(std::move(parts.violations)),
      retry_delay_(parts.retry_delay),
      metadata_(std::move(parts.metadata)),
      called_(std::move(parts.called)) {}

Error::Error(const grpc::Status& status, Called called) : Error(Parts::of(status, std::move(called))) {}

Error::Error(grpc::StatusCode code, v1::FailureReason reason, const std::string& message, v1::NextStep next,
             std::map<std::string, std::string> metadata)
    : Error(Parts{code, message, name_of(reason), name_of(next), {}, 0, {}, {}, std::move(metadata), {}}) {}

bool Error::may_retry_here() const {
  return next_ == v1::NEXT_STEP_RETRY_HERE;
}

bool Error::may_retry_elsewhere() const {
  return next_ == v1::NEXT_STEP_RETRY_OTHER_CONSUMER;
}

std::string name_of(grpc::StatusCode code) {
  constexpr std::array kNames = {"OK",
                                 "CANCELLED",
                                 "UNKNOWN",
                                 "INVALID_ARGUMENT",
                                 "DEADLINE_EXCEEDED",
                                 "NOT_FOUND",
                                 "ALREADY_EXISTS",
                                 "PERMISSION_DENIED",
                                 "RESOURCE_EXHAUSTED",
                                 "FAILED_PRECONDITION",
                                 "ABORTED",
                                 "OUT_OF_RANGE",
                                 "UNIMPLEMENTED",
                                 "INTERNAL",
                                 "UNAVAILABLE",
                                 "DATA_LOSS",
                                 "UNAUTHENTICATED"};
  const auto index = static_cast<std::size_t>(code);
  return index < kNames.size() ? kNames[index] : std::to_string(index);
}

}  // namespace kvgrpc
