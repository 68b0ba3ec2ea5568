#include "json.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>

namespace executor {

using google::protobuf::util::JsonStringToMessage;
using google::protobuf::util::MessageToJsonString;

std::string to_json(const Message& message) {
  std::string json;
  const auto status = MessageToJsonString(message, &json);
  if (!status.ok()) throw Unable(status.ToString());
  return json;
}

void from_json(const std::string& json, Message& message) {
  const auto status = JsonStringToMessage(json, &message);
  if (!status.ok()) throw Unable(message.GetTypeName() + ": " + status.ToString());
}

std::string quoted(const std::string& text) {
  Value value;
  value.set_string_value(text);
  return to_json(value);
}

const Value* find(const Struct& fields, const std::string& name) {
  const auto found = fields.fields().find(name);
  return found == fields.fields().end() || found->second.has_null_value() ? nullptr : &found->second;
}

const Value& field(const Struct& fields, const std::string& name) {
  const Value* value = find(fields, name);
  if (!value) throw Unable("the request has no " + name);
  return *value;
}

std::string text(const Struct& fields, const std::string& name) { return field(fields, name).string_value(); }

std::string text(const Struct& fields, const std::string& name, const std::string& unset) {
  const Value* value = find(fields, name);
  return value ? value->string_value() : unset;
}

std::optional<kvgrpc::Nanoseconds> seconds(const Struct& fields, const std::string& name) {
  const Value* value = find(fields, name);
  if (!value) return std::nullopt;
  return kvgrpc::Nanoseconds(static_cast<std::int64_t>(value->number_value() * 1e9));
}

void read_message(const Struct& fields, const std::string& name, Message& message) {
  if (const Value* value = find(fields, name)) from_json(to_json(*value), message);
}

kvgrpc::CallOptions call_options(const Struct& fields) {
  kvgrpc::CallOptions options;
  options.timeout = seconds(fields, "deadlineS");
  if (const Value* metadata = find(fields, "metadata")) {
    for (const auto& [key, value] : metadata->struct_value().fields()) {
      options.metadata.emplace(key, value.string_value());
    }
  }
  return options;
}

std::string error_json(const kvgrpc::Error& error) {
  Struct object;
  auto& fields = *object.mutable_fields();
  fields["code"].set_string_value(kvgrpc::name_of(error.code()));
  fields["reason"].set_string_value(error.reason_name());
  fields["message"].set_string_value(error.message());
  fields["next"].set_string_value(kvgrpc::name_of(error.next()));
  fields["engineId"].set_string_value(error.engine_id());
  fields["incarnation"].set_string_value(error.incarnation() ? std::to_string(error.incarnation()) : "");
  auto& metadata = *fields["metadata"].mutable_struct_value()->mutable_fields();
  for (const auto& [key, value] : error.metadata()) metadata[key].set_string_value(value);
  auto& violations = *fields["violations"].mutable_list_value();
  for (const auto& violation : error.violations()) {
    auto& row = *violations.add_values()->mutable_struct_value()->mutable_fields();
    row["field"].set_string_value(violation.field);
    row["description"].set_string_value(violation.description);
  }
  if (error.retry_delay()) {
    fields["retryDelayS"].set_number_value(std::chrono::duration<double>(*error.retry_delay()).count());
  }
  return to_json(object);
}

std::string error_json(const Unable& error) {
  return "{\"code\":\"EXECUTOR\",\"message\":" + quoted(error.what()) + "}";
}

}  // namespace executor
