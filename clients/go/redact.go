package kvgrpc

import (
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// Redacted returns a message as text for logs. It is the text that fmt prints, with [REDACTED] in place of the secrets:
// the tokens of grants, transfer keys and whatever else the schema marks with debug_redact. The String method of a
// message shows these in full.
func Redacted(message proto.Message) string {
	if message == nil || !message.ProtoReflect().IsValid() {
		return "<nil>"
	}
	copied := proto.Clone(message)
	redact(copied.ProtoReflect())
	return prototext.MarshalOptions{}.Format(copied)
}

var redacted = protoreflect.ValueOfBytes([]byte("[REDACTED]"))

func redact(message protoreflect.Message) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		options, _ := field.Options().(*descriptorpb.FieldOptions)
		switch {
		case options.GetDebugRedact() && field.IsList():
			for i := range value.List().Len() {
				value.List().Set(i, redacted)
			}
		case options.GetDebugRedact():
			message.Set(field, redacted)
		case field.Message() == nil || field.IsMap():
		case field.IsList():
			for i := range value.List().Len() {
				redact(value.List().Get(i).Message())
			}
		default:
			redact(value.Message())
		}
		return true
	})
}
