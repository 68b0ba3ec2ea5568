// The errors that pass by themselves.
#pragma once

#include "kvgrpc/error.h"

namespace kvgrpc::detail {

// Returns whether the same call may succeed in a moment. That is so when the server is away, silent or full, and when
// something other than a kvgrpc server failed (a cut connection, a proxy), which names no reason.
inline bool is_passing(const Error& error) {
  switch (error.code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return true;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      // gRPC itself reports a message over the reader's size limit with these codes. The same message would come again.
      return !error.reason_name().empty() || error.message().find("larger than max") == std::string::npos;
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:
      return error.reason_name().empty();
    default:
      return false;
  }
}

}  // namespace kvgrpc::detail
