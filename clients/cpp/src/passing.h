// Which errors pass by themselves.
#pragma once

#include "kvgrpc/error.h"

namespace kvgrpc::detail {

// Whether the same call may work in a moment: the server is away, silent or full, or something between failed that is no
// server of kvgrpc (a connection that was cut, a proxy), and so names no reason.
inline bool is_passing(const Error& error) {
  switch (error.code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return true;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      // gRPC itself says so of a message that is longer than its reader takes: the same message would come again.
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
