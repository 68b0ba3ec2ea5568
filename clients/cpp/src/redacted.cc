#include "kvgrpc/redacted.h"

#include <memory>
#include <set>
#include <vector>

namespace kvgrpc {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr char kRedacted[] = "[REDACTED]";

// The secrets by name, because Protobuf 3.21 does not know the option debug_redact. A test of the schema compares them.
const std::set<std::string> kSecrets = {"metadata", "nonce",          "proof",  "proofs",      "rank_ticket",
                                        "ticket",   "session_secret", "token",  "transfer_key"};

void redact(Message& message) {
  const auto* reflection = message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  for (const auto* field : fields) {
    const int count = field->is_repeated() ? reflection->FieldSize(message, field) : 0;
    if (field->type() == FieldDescriptor::TYPE_BYTES && kSecrets.count(field->name()) > 0) {
      if (!field->is_repeated()) reflection->SetString(&message, field, kRedacted);
      for (int i = 0; i < count; ++i) reflection->SetRepeatedString(&message, field, i, kRedacted);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && !field->is_map()) {
      if (!field->is_repeated()) redact(*reflection->MutableMessage(&message, field));
      for (int i = 0; i < count; ++i) redact(*reflection->MutableRepeatedMessage(&message, field, i));
    }
  }
}

}  // namespace

std::string redacted(const Message& message) {
  const std::unique_ptr<Message> copy(message.New());
  copy->CopyFrom(message);
  redact(*copy);
  return copy->ShortDebugString();
}

}  // namespace kvgrpc
