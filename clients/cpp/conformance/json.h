// The JSON of the executor's protocol, read by Protobuf's own parser: a line is a google.protobuf.Struct.
#pragma once

#include <google/protobuf/struct.pb.h>
#include <kvgrpc/kvgrpc.h>

#include <optional>
#include <stdexcept>
#include <string>

namespace executor {

using google::protobuf::Message;
using google::protobuf::Struct;
using google::protobuf::Value;

// A request that the executor cannot carry out.
struct Unable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string to_json(const Message& message);
void from_json(const std::string& json, Message& message);
std::string quoted(const std::string& text);

// Return fields of a request. Without a default, a missing field throws Unable.
const Value* find(const Struct& fields, const std::string& name);
const Value& field(const Struct& fields, const std::string& name);
std::string text(const Struct& fields, const std::string& name);
std::string text(const Struct& fields, const std::string& name, const std::string& unset);
std::optional<kvgrpc::Nanoseconds> seconds(const Struct& fields, const std::string& name);
void read_message(const Struct& fields, const std::string& name, Message& message);
kvgrpc::CallOptions call_options(const Struct& fields);

// Returns the object of `error`.
std::string error_json(const kvgrpc::Error& error);
std::string error_json(const Unable& error);

}  // namespace executor
