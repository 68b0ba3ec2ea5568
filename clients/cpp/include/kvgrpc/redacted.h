// Messages as text for logs.
#pragma once

#include <google/protobuf/message.h>

#include <string>

namespace kvgrpc {

// Returns the message's text on one line, with [REDACTED] in place of its secrets: the tokens of grants, transfer keys,
// and what else the schema marks with debug_redact. A message's own DebugString shows these in full, except in newer
// versions of Protobuf.
std::string redacted(const google::protobuf::Message& message);

}  // namespace kvgrpc
