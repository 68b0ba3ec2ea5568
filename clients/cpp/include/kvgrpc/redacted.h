// Messages as text, for logs.
#pragma once

#include <google/protobuf/message.h>

#include <string>

namespace kvgrpc {

// The message's text on one line, with [REDACTED] in place of its secrets: tokens of grants, transfer keys, and what else
// the schema marks with debug_redact. A message's own DebugString shows these in full, but in newer Protobufs.
std::string redacted(const google::protobuf::Message& message);

}  // namespace kvgrpc
