package dev.kvgrpc.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.ByteString;
import com.google.protobuf.Message;
import dev.kvgrpc.client.CleanUp;
import dev.kvgrpc.client.ClientOptions;
import dev.kvgrpc.client.KeptLease;
import dev.kvgrpc.client.KvgrpcClient;
import dev.kvgrpc.client.KvgrpcException;
import dev.kvgrpc.client.LeaseKeeper;
import dev.kvgrpc.client.MessageStream;
import dev.kvgrpc.client.Moves;
import dev.kvgrpc.client.Redacted;
import dev.kvgrpc.client.TlsFiles;
import dev.kvgrpc.client.TransferWatch;
import dev.kvgrpc.client.TransferWatch.After;
import dev.kvgrpc.v1.HandOver;
import dev.kvgrpc.v1.LeaseRef;
import dev.kvgrpc.v1.LeaseState;
import dev.kvgrpc.v1.PullBlocksRequest;
import dev.kvgrpc.v1.TransferFilter;
import dev.kvgrpc.v1.WaitCondition;
import dev.kvgrpc.v1.WaitTransferResponse;
import io.grpc.CallOptions;
import io.grpc.ClientInterceptors;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CancellationException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/** Carries out one request of the runner with the wrapper, and judges nothing. */
final class Executor {
  private final Map<String, KvgrpcClient> clients = new ConcurrentHashMap<>();
  private final Map<String, Reader> streams = new ConcurrentHashMap<>();
  private final Map<String, Opened> opened = new ConcurrentHashMap<>();
  private final Map<String, Keeping> keepers = new ConcurrentHashMap<>();

  private record Opened(MethodDescriptor<Message, Message> method, MessageStream<Message, Message> stream) {}

  private record Keeping(LeaseKeeper keeper, List<KeptLease> leases) {}

  /** Returns the answer to one line. */
  String answer(String line) {
    JsonObject request = JsonParser.parseString(line).getAsJsonObject();
    JsonObject answer = new JsonObject();
    answer.add("id", request.get("id"));
    try {
      answer.add("ok", perform(request));
    } catch (KvgrpcException error) {
      answer.add("error", json(error));
    } catch (RuntimeException | InterruptedException unable) {
      JsonObject error = new JsonObject();
      error.addProperty("code", "EXECUTOR");
      error.addProperty("message", unable.toString());
      answer.add("error", error);
    }
    return answer.toString();
  }

  private JsonObject perform(JsonObject request) throws InterruptedException {
    return switch (text(request, "op")) {
      case "hello" -> hello();
      case "connect" -> {
        clients.put(text(request, "server"), KvgrpcClient.connect(text(request, "address"), options(request)));
        yield new JsonObject();
      }
      case "call" -> call(request);
      case "open" -> open(request);
      case "send" -> {
        Opened opened = opened(request);
        opened.stream().send(Methods.request(opened.method(), request.get("request")));
        yield new JsonObject();
      }
      case "finish" -> {
        opened(request).stream().finish();
        yield new JsonObject();
      }
      case "next" -> find(streams, request, "stream").next(seconds(request, "timeoutS", 10));
      case "cancel" -> {
        find(streams, request, "stream").close();
        yield new JsonObject();
      }
      case "wait" -> await(request);
      case "pull" -> pull(request);
      case "move" -> move(request);
      case "redacted" -> {
        JsonObject answer = new JsonObject();
        Message message = Methods.request(Methods.named(text(request, "method")), request.get("request"));
        answer.addProperty("text", Redacted.text(message));
        yield answer;
      }
      case "watch" -> watch(request);
      case "watchEngine" -> {
        streams.put(text(request, "stream"), new Reader.Engine(client(request).watchEngine()));
        yield new JsonObject();
      }
      case "keepAlive" -> keepAlive(request);
      case "kept" -> kept(request);
      case "stopKeeping" -> {
        find(keepers, request, "keeper").keeper().close();
        yield new JsonObject();
      }
      case "cleanUp" -> cleanUp(request);
      case "close" -> {
        client(request).close();
        yield new JsonObject();
      }
      default -> throw new IllegalArgumentException("no such op: " + text(request, "op"));
    };
  }

  private static JsonObject hello() {
    JsonObject answer = new JsonObject();
    answer.addProperty("language", "java");
    answer.addProperty("version", System.getProperty("java.version"));
    return answer;
  }

  private JsonObject call(JsonObject request) {
    MethodDescriptor<Message, Message> method = Methods.named(text(request, "method"));
    Message message = Methods.request(method, request.get("request"));
    CallOptions options = CallOptions.DEFAULT;
    if (request.has("deadlineS")) {
      options = options.withDeadlineAfter(seconds(request, "deadlineS", 0).toNanos(), TimeUnit.NANOSECONDS);
    }
    var channel = ClientInterceptors.intercept(
        client(request).channel(), MetadataUtils.newAttachHeadersInterceptor(metadata(request)));
    CallOptions stated = options;
    Message reply =
        KvgrpcClient.call(sent -> ClientCalls.blockingUnaryCall(channel, method, stated, sent), message);
    JsonObject answer = new JsonObject();
    answer.add("reply", Methods.json(reply));
    return answer;
  }

  private Opened opened(JsonObject request) {
    return find(opened, request, "stream");
  }

  private JsonObject open(JsonObject request) throws InterruptedException {
    MethodDescriptor<Message, Message> method = Methods.named(text(request, "method"));
    Message first = request.has("request") ? Methods.request(method, request.get("request")) : null;
    MessageStream<Message, Message> stream = client(request).open(method, metadata(request));
    String name = text(request, "stream");
    opened.put(name, new Opened(method, stream));
    streams.put(name, new Reader.Plain(stream));
    if (first != null) {
      stream.send(first);
    }
    if (method.getType().clientSendsOneMessage()) {
      stream.finish();
    }
    try {
      JsonObject answer = new JsonObject();
      answer.add("metadata", json(stream.headers().get()));
      return answer;
    } catch (ExecutionException failed) {
      throw KvgrpcException.of(failed);
    }
  }

  private JsonObject await(JsonObject request) {
    WaitCondition until =
        WaitCondition.valueOf("WAIT_CONDITION_" + (request.has("until") ? text(request, "until") : "ENDED"));
    WaitTransferResponse reply =
        client(request).await(text(request, "transferId"), until, seconds(request, "timeoutS", 60));
    JsonObject answer = new JsonObject();
    answer.add("transfer", Methods.json(reply.getTransfer()));
    answer.addProperty("conditionMet", reply.getConditionMet());
    return answer;
  }

  private JsonObject pull(JsonObject request) {
    PullBlocksRequest asked =
        (PullBlocksRequest) Methods.message(PullBlocksRequest.newBuilder(), request.get("request"));
    JsonObject answer = new JsonObject();
    answer.add("transfer", Methods.json(Moves.pull(client(request), asked, seconds(request, "timeoutS", 10))));
    return answer;
  }

  private JsonObject move(JsonObject request) {
    HandOver asked = (HandOver) Methods.message(HandOver.newBuilder(), request.get("request"));
    String requestId = request.has("requestId") ? text(request, "requestId") : "";
    Moves.Moved moved = Moves.move(
        client(request),
        find(clients, request, "to"),
        asked.getBlocks(),
        asked.getContent(),
        new Moves.Options(requestId, Optional.empty(), seconds(request, "timeoutS", 10)));
    JsonObject answer = new JsonObject();
    answer.add("transfer", Methods.json(moved.transfer()));
    answer.add("blocks", Methods.json(moved.blocks()));
    return answer;
  }

  private JsonObject watch(JsonObject request) {
    TransferFilter.Builder filter = TransferFilter.newBuilder();
    if (request.has("filter")) {
      Methods.message(filter, request.get("filter"));
    }
    After after = After.PRESENT;
    if (request.has("after")) {
      JsonObject point = request.getAsJsonObject("after");
      after = new After(number(point, "eventSeq"), number(point, "incarnation"));
    }
    TransferWatch watch = client(request).watch(filter.build(), after);
    streams.put(text(request, "stream"), new Reader.Transfers(watch));
    return new JsonObject();
  }

  private JsonObject keepAlive(JsonObject request) {
    List<LeaseRef> refs = new ArrayList<>();
    for (JsonElement ref : request.getAsJsonArray("leases")) {
      refs.add((LeaseRef) Methods.message(LeaseRef.newBuilder(), ref));
    }
    Duration ttl = request.has("ttlS") ? seconds(request, "ttlS", 0) : null;
    // Leases are added one by one, because the keeper's list no longer has those that are over.
    LeaseKeeper keeper = client(request).keepAlive(List.of(), ttl);
    keepers.put(text(request, "keeper"), new Keeping(keeper, refs.stream().map(keeper::keep).toList()));
    return new JsonObject();
  }

  private JsonObject kept(JsonObject request) throws InterruptedException {
    KeptLease lease = find(keepers, request, "keeper").leases().get(request.get("index").getAsInt());
    LeaseState state;
    try {
      state = lease.over().get(seconds(request, "timeoutS", 10).toNanos(), TimeUnit.NANOSECONDS).state();
    } catch (TimeoutException | CancellationException | ExecutionException none) {
      state = lease.state();
    }
    JsonObject answer = new JsonObject();
    answer.addProperty("state", state.name().replace("LEASE_STATE_", ""));
    return answer;
  }

  private JsonObject cleanUp(JsonObject request) {
    List<CleanUp.Side> sides = new ArrayList<>();
    for (JsonElement row : request.getAsJsonArray("sides")) {
      JsonObject side = row.getAsJsonObject();
      String key = side.has("transferKey") ? text(side, "transferKey") : "";
      String id = side.has("transferId") ? text(side, "transferId") : "";
      List<String> allocations = new ArrayList<>();
      if (side.has("freeAllocationIds")) {
        side.getAsJsonArray("freeAllocationIds").forEach(free -> allocations.add(free.getAsString()));
      }
      sides.add(new CleanUp.Side(client(side), bytes(key), id, allocations));
    }
    JsonArray outcomes = new JsonArray();
    for (CleanUp.Outcome outcome : CleanUp.run(sides, request.has("message") ? text(request, "message") : "")) {
      outcomes.add(outcome.reply()
          .map(reply -> reply.getOutcome().name().replace("CANCEL_OUTCOME_", ""))
          .orElseGet(() -> reason(outcome.error().orElseThrow())));
    }
    JsonObject answer = new JsonObject();
    answer.add("outcomes", outcomes);
    return answer;
  }

  private static String reason(KvgrpcException error) {
    return error.reason().isEmpty() ? error.code().name() : error.reason();
  }

  private KvgrpcClient client(JsonObject request) {
    return find(clients, request, "server");
  }

  private static <T> T find(Map<String, T> named, JsonObject request, String field) {
    T found = named.get(text(request, field));
    if (found == null) {
      throw new IllegalArgumentException("no such " + field + ": " + text(request, field));
    }
    return found;
  }

  private static JsonObject json(KvgrpcException error) {
    JsonObject json = new JsonObject();
    json.addProperty("code", error.code().name());
    json.addProperty("reason", error.reason());
    json.addProperty("message", error.description());
    json.addProperty("next", error.metadata().containsKey("next") ? error.next().name().replace("NEXT_STEP_", "") : "");
    json.addProperty("engineId", error.engineId());
    json.addProperty("incarnation", error.metadata().getOrDefault("incarnation", ""));
    JsonObject metadata = new JsonObject();
    error.metadata().forEach(metadata::addProperty);
    json.add("metadata", metadata);
    JsonArray violations = new JsonArray();
    for (KvgrpcException.Violation violation : error.violations()) {
      JsonObject row = new JsonObject();
      row.addProperty("field", violation.field());
      row.addProperty("description", violation.description());
      violations.add(row);
    }
    json.add("violations", violations);
    error.retryDelay().ifPresent(delay -> json.addProperty("retryDelayS", delay.toNanos() / 1e9));
    return json;
  }

  private static JsonObject json(Metadata headers) {
    JsonObject json = new JsonObject();
    for (String name : headers.keys()) {
      if (!name.endsWith(Metadata.BINARY_HEADER_SUFFIX)) {
        json.addProperty(name, headers.get(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER)));
      }
    }
    return json;
  }

  private static Metadata metadata(JsonObject request) {
    Metadata headers = new Metadata();
    if (request.has("metadata")) {
      request.getAsJsonObject("metadata").asMap().forEach((name, value) ->
          headers.put(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER), value.getAsString()));
    }
    return headers;
  }

  private static ClientOptions options(JsonObject request) {
    ClientOptions made = ClientOptions.defaults();
    if (request.has("tls")) {
      JsonObject tls = request.getAsJsonObject("tls");
      TlsFiles files = tls.has("dir")
          ? TlsFiles.in(path(tls, "dir"))
          : new TlsFiles(path(tls, "cert"), path(tls, "key"), path(tls, "ca"));
      files = tls.has("dir") && tls.has("cert") ? files.withCertificate(path(tls, "cert"), path(tls, "key")) : files;
      files = tls.has("dir") && tls.has("ca") ? files.withCa(path(tls, "ca")) : files;
      made = made.withTls(files);
    }
    made = request.has("token") ? made.withToken(text(request, "token")) : made;
    return request.has("tokenFile") ? made.withTokenFile(path(request, "tokenFile")) : made;
  }

  /** Returns a path, or null where there is none. */
  private static Path path(JsonObject request, String field) {
    return request.has(field) ? Path.of(text(request, field)) : null;
  }

  private static String text(JsonObject request, String field) {
    if (!request.has(field)) {
      throw new IllegalArgumentException("the request has no " + field);
    }
    return request.get(field).getAsString();
  }

  private static long number(JsonObject request, String field) {
    return request.has(field) ? request.get(field).getAsLong() : 0;
  }

  private static Duration seconds(JsonObject request, String field, double otherwise) {
    double seconds = request.has(field) ? request.get(field).getAsDouble() : otherwise;
    return Duration.ofNanos((long) (seconds * 1e9));
  }

  /** Returns the bytes of standard base64, of either alphabet. */
  private static ByteString bytes(String base64) {
    return ByteString.copyFrom(Base64.getDecoder().decode(base64.replace('-', '+').replace('_', '/')));
  }
}
