package dev.kvgrpc.client;

import com.google.protobuf.ByteString;
import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import com.google.protobuf.TextFormat;
import java.util.List;

/** Messages as text for logs. */
public final class Redacted {
  private static final ByteString REDACTED = ByteString.copyFromUtf8("[REDACTED]");

  private Redacted() {}

  /**
   * Returns the message's text on one line, with [REDACTED] in place of what the schema marks with {@code
   * debug_redact}: the tokens of grants, transfer keys, and others. A message's own {@code toString} may show them in
   * full.
   */
  public static String text(Message message) {
    return TextFormat.printer().emittingSingleLine(true).printToString(redacted(message));
  }

  private static Message redacted(Message message) {
    Message.Builder copy = message.toBuilder();
    message.getAllFields().forEach((field, value) -> {
      if (field.getOptions().getDebugRedact()) {
        copy.setField(field, field.isRepeated() ? ((List<?>) value).stream().map(row -> REDACTED).toList() : REDACTED);
      } else if (field.getJavaType() == FieldDescriptor.JavaType.MESSAGE && !field.isMapField()) {
        copy.setField(
            field,
            field.isRepeated()
                ? ((List<?>) value).stream().map(row -> redacted((Message) row)).toList()
                : redacted((Message) value));
      }
    });
    return copy.build();
  }
}
