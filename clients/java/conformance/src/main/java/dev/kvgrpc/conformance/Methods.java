package dev.kvgrpc.conformance;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.JsonFormat;
import dev.kvgrpc.v1.AdminServiceGrpc;
import dev.kvgrpc.v1.FleetServiceGrpc;
import dev.kvgrpc.v1.HandoffServiceGrpc;
import dev.kvgrpc.v1.HandshakeServiceGrpc;
import dev.kvgrpc.v1.LeaseServiceGrpc;
import dev.kvgrpc.v1.PoolServiceGrpc;
import dev.kvgrpc.v1.SchedulerServiceGrpc;
import dev.kvgrpc.v1.TensorServiceGrpc;
import dev.kvgrpc.v1.TransferServiceGrpc;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.PrototypeMarshaller;
import io.grpc.ServiceDescriptor;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** The methods of the schema by name, and its messages as JSON. */
final class Methods {
  private static final Map<String, MethodDescriptor<Message, Message>> BY_NAME = byName();

  private Methods() {}

  /** Returns the method of a name such as {@code kvgrpc.v1.LeaseService/GetLease}. */
  static MethodDescriptor<Message, Message> named(String name) {
    MethodDescriptor<Message, Message> method = BY_NAME.get(name);
    if (method == null) {
      throw new IllegalArgumentException("no such method: " + name);
    }
    return method;
  }

  /** Returns the method's request from its JSON; an empty request without JSON. */
  static Message request(MethodDescriptor<Message, Message> method, JsonElement json) {
    Message prototype = (Message) ((PrototypeMarshaller<?>) method.getRequestMarshaller()).getMessagePrototype();
    return json == null ? prototype : message(prototype.newBuilderForType(), json);
  }

  static Message message(Message.Builder builder, JsonElement json) {
    try {
      JsonFormat.parser().merge(json.toString(), builder);
      return builder.build();
    } catch (InvalidProtocolBufferException malformed) {
      throw new IllegalArgumentException(malformed.getMessage(), malformed);
    }
  }

  static JsonObject json(Message message) {
    try {
      return JsonParser.parseString(JsonFormat.printer().print(message)).getAsJsonObject();
    } catch (InvalidProtocolBufferException unprintable) {
      throw new IllegalStateException(unprintable);
    }
  }

  @SuppressWarnings("unchecked")
  private static Map<String, MethodDescriptor<Message, Message>> byName() {
    List<ServiceDescriptor> services = List.of(
        AdminServiceGrpc.getServiceDescriptor(),
        FleetServiceGrpc.getServiceDescriptor(),
        HandoffServiceGrpc.getServiceDescriptor(),
        HandshakeServiceGrpc.getServiceDescriptor(),
        LeaseServiceGrpc.getServiceDescriptor(),
        PoolServiceGrpc.getServiceDescriptor(),
        SchedulerServiceGrpc.getServiceDescriptor(),
        TensorServiceGrpc.getServiceDescriptor(),
        TransferServiceGrpc.getServiceDescriptor());
    Map<String, MethodDescriptor<Message, Message>> found = new HashMap<>();
    for (ServiceDescriptor service : services) {
      for (MethodDescriptor<?, ?> method : service.getMethods()) {
        found.put(method.getFullMethodName(), (MethodDescriptor<Message, Message>) method);
      }
    }
    return found;
  }
}
