package dev.kvgrpc.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.kvgrpc.v1.Failure;
import dev.kvgrpc.v1.FailureReason;
import dev.kvgrpc.v1.NextStep;
import dev.kvgrpc.v1.ResponseHeader;
import dev.kvgrpc.v1.Transfer;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusException;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;

/**
 * The reason that a call or a stream failed. Programs decide by {@link #next}, {@link #reason} and {@link #code}; the
 * message is for readers. A status that no kvgrpc server made (a proxy's, gRPC's own) has only a code and a message.
 */
public final class KvgrpcException extends RuntimeException {
  /** The domain of reasons that are names of {@link FailureReason}. */
  static final String DOMAIN = "kvgrpc.dev";

  private static final String REASON_PREFIX = "FAILURE_REASON_";
  private static final String NEXT_PREFIX = "NEXT_STEP_";
  private static final long serialVersionUID = 1;

  private final transient Details details;
  private final Status.Code code;
  private final String description;

  /** A wrong field of the request. */
  public record Violation(String field, String description) {}

  private record Details(
      String reason,
      Map<String, String> metadata,
      List<Violation> violations,
      Optional<Duration> retryDelay,
      Called called) {
    static final Details NONE = ofThisSide("", Map.of());

    /** Returns the details of an error that no server made. */
    static Details ofThisSide(String reason, Map<String, String> metadata) {
      return new Details(reason, metadata, List.of(), Optional.empty(), Called.NONE);
    }
  }

  private KvgrpcException(Status status, Details details, Throwable cause) {
    super(sentence(status, details), cause);
    this.code = status.getCode();
    this.description = withoutRepetition(status.getDescription(), details);
    this.details = details;
  }

  /** Returns the typed error of whatever a stub threw or a future failed with. */
  public static KvgrpcException of(Throwable failure) {
    if (failure instanceof KvgrpcException typed) {
      return typed;
    }
    if ((failure instanceof ExecutionException || failure instanceof CompletionException) && failure.getCause() != null) {
      return of(failure.getCause());
    }
    if (failure instanceof StatusRuntimeException error) {
      return of(error.getStatus(), error.getTrailers(), error);
    }
    if (failure instanceof StatusException error) {
      return of(error.getStatus(), error.getTrailers(), error);
    }
    Status status = Status.UNKNOWN.withDescription(String.valueOf(failure));
    return new KvgrpcException(status, Details.NONE, failure);
  }

  static KvgrpcException of(Status status, Metadata trailers, Throwable cause) {
    return new KvgrpcException(status, details(status, trailers), cause != null ? cause : status.getCause());
  }

  static KvgrpcException of(Status status) {
    return of(status, null, null);
  }

  /** Returns the error for a reader that itself notices a new life. */
  static KvgrpcException incarnationChanged(ResponseHeader header) {
    Map<String, String> metadata = Map.of(
        "next", "RECOMPUTE",
        "engine_id", header.getEngineId(),
        "incarnation", Long.toString(header.getIncarnation()));
    Details details = Details.ofThisSide("INCARNATION_CHANGED", metadata);
    return new KvgrpcException(Status.ABORTED.withDescription("the engine has begun another life"), details, null);
  }

  /** Returns the error of a transfer that has ended without its KV. */
  static KvgrpcException of(Transfer transfer) {
    Failure failure = transfer.getFailure();
    boolean stated = failure.getReasonValue() != 0;
    Map<String, String> metadata = Map.of(
        "next", States.next(failure).name().replace(NEXT_PREFIX, ""),
        "transfer_id", transfer.getTransferId(),
        "phase", States.name(failure.getPhase()));
    String reason = stated ? States.reason(failure).name().replace(REASON_PREFIX, "") : "CANCELLED";
    String message =
        failure.getMessage().isEmpty() ? "the transfer has ended without its KV" : failure.getMessage();
    Details details = Details.ofThisSide(reason, metadata);
    return new KvgrpcException(Status.ABORTED.withDescription(message), details, null);
  }

  /** Returns the error of a transfer that is not done when the time of a wait is over. */
  static KvgrpcException late(Transfer transfer) {
    Map<String, String> metadata =
        Map.of("transfer_id", transfer.getTransferId(), "phase", States.phase(transfer));
    Details details = Details.ofThisSide("DEADLINE", metadata);
    return new KvgrpcException(
        Status.DEADLINE_EXCEEDED.withDescription("the transfer is not done in its time"), details, null);
  }

  /** Returns the gRPC code. */
  public Status.Code code() {
    return code;
  }

  /**
   * Returns the name of a {@link FailureReason} without its prefix, even if this version does not know it; otherwise
   * empty.
   */
  public String reason() {
    return details.reason();
  }

  /** Returns the reason as the schema's enum; INTERNAL for an unknown one, UNSPECIFIED without one. */
  public FailureReason failureReason() {
    if (reason().isEmpty()) {
      return FailureReason.FAILURE_REASON_UNSPECIFIED;
    }
    return named(FailureReason.class, REASON_PREFIX + reason(), FailureReason.FAILURE_REASON_INTERNAL);
  }

  /** Returns the recommended next step. UNSPECIFIED means that it is unknown: do not retry automatically. */
  public NextStep next() {
    boolean known = isNamed(FailureReason.class, REASON_PREFIX + reason());
    String name = NEXT_PREFIX + metadata().getOrDefault("next", "");
    return known ? named(NextStep.class, name, NextStep.NEXT_STEP_UNSPECIFIED) : NextStep.NEXT_STEP_UNSPECIFIED;
  }

  /** Returns whether the same call may succeed later, here: after {@link #retryDelay}, where there is one. */
  public boolean mayRetryHere() {
    return next() == NextStep.NEXT_STEP_RETRY_HERE;
  }

  /** Returns the server's message. {@link #getMessage} adds the code, the reason, the wrong fields and the call. */
  public String description() {
    return description;
  }

  /** Returns the engine that refused; empty when no engine did. */
  public String engineId() {
    return metadata().getOrDefault("engine_id", "");
  }

  /** Returns the incarnation of the engine that refused; 0 when no engine did. */
  public long incarnation() {
    try {
      return Long.parseLong(metadata().getOrDefault("incarnation", "0"));
    } catch (NumberFormatException malformed) {
      return 0;
    }
  }

  /** Returns the wrong fields of the request. */
  public List<Violation> violations() {
    return details.violations();
  }

  /** Returns how long to wait before the same call; empty where the server stated nothing. */
  public Optional<Duration> retryDelay() {
    return details.retryDelay();
  }

  /** Returns what the reason needs: {@code limit}, {@code group}, {@code phase} and others. */
  public Map<String, String> metadata() {
    return details.metadata();
  }

  /** Returns the called method, {@code PoolService/AllocateBlocks}; empty where the error is not of a call. */
  public String method() {
    return details.called().method();
  }

  /** Returns the server that was called. */
  public String address() {
    return details.called().address();
  }

  /**
   * Returns the key of the request, if any. The same request with this key retries the call and makes no second one.
   */
  public String idempotencyKey() {
    return details.called().idempotencyKey();
  }

  /** Returns whether gRPC itself refused a message over the reader's size limit. The same message would come again. */
  boolean isTooLarge() {
    return !isServers() && (description.contains("exceeds maximum size") || description.contains("larger than max"));
  }

  /** Returns whether another attempt may succeed: the server is away or too busy for the moment. */
  boolean isPassing() {
    return switch (code) {
      case UNAVAILABLE, DEADLINE_EXCEEDED -> true;
      case RESOURCE_EXHAUSTED -> !isTooLarge();
      // The connection was cut, or a proxy reset the call or the stream.
      case CANCELLED, INTERNAL, UNKNOWN -> !isServers();
      default -> false;
    };
  }

  /** Returns whether a kvgrpc server made this status: it has a reason. */
  boolean isServers() {
    return !reason().isEmpty();
  }

  private static Details details(Status status, Metadata trailers) {
    String reason = "";
    Map<String, String> metadata = Map.of();
    List<Violation> violations = List.of();
    Optional<Duration> retryDelay = Optional.empty();
    try {
      com.google.rpc.Status carried = trailers == null ? null : StatusProto.fromStatusAndTrailers(status, trailers);
      for (Any any : carried == null ? List.<Any>of() : carried.getDetailsList()) {
        if (any.is(ErrorInfo.class)) {
          ErrorInfo info = any.unpack(ErrorInfo.class);
          if (info.getDomain().equals(DOMAIN)) {
            reason = info.getReason();
            metadata = Map.copyOf(info.getMetadataMap());
          }
        } else if (any.is(BadRequest.class)) {
          violations = any.unpack(BadRequest.class).getFieldViolationsList().stream()
              .map(row -> new Violation(row.getField(), row.getDescription()))
              .toList();
        } else if (any.is(RetryInfo.class)) {
          retryDelay = Optional.of(Durations.toJava(any.unpack(RetryInfo.class).getRetryDelay()));
        }
      }
    } catch (InvalidProtocolBufferException | IllegalArgumentException | ArithmeticException malformed) {
      // Details that cannot be read count as none. The code still counts.
    }
    return new Details(reason, metadata, violations, retryDelay, Called.in(trailers));
  }

  /** Returns the code, the reason, the message and the wrong fields. */
  private static String sentence(Status status, Details details) {
    String said = withoutRepetition(status.getDescription(), details);
    StringBuilder text = new StringBuilder(status.getCode().name());
    if (!details.reason().isEmpty()) {
      text.append(' ').append(details.reason());
    }
    text.append(": ");
    for (Violation violation : details.violations()) {
      if (violation.description().equals(said)) {
        text.append(violation.field()).append(": ");
        break;
      }
    }
    text.append(said);
    for (Violation violation : details.violations()) {
      if (!violation.description().equals(said)) {
        text.append("; ").append(violation.field()).append(": ").append(violation.description());
      }
    }
    if (!details.called().method().isEmpty()) {
      text.append(" (").append(details.called().method()).append(" at ").append(details.called().address()).append(')');
    }
    return text.toString();
  }

  /** Returns the message without the reason and the violations. A server adds both for tools that show nothing else. */
  private static String withoutRepetition(String description, Details details) {
    String sentence = description == null ? "" : description;
    String prefix = details.reason() + ": ";
    if (!details.reason().isEmpty() && sentence.startsWith(prefix)) {
      sentence = sentence.substring(prefix.length());
    }
    for (Violation violation : details.violations()) {
      if (sentence.startsWith(violation.field() + ": " + violation.description())) {
        return violation.description();
      }
    }
    int listed = details.violations().isEmpty() ? -1 : sentence.indexOf("; " + details.violations().get(0).field() + ": ");
    return listed < 0 ? sentence : sentence.substring(0, listed);
  }

  private static <E extends Enum<E>> boolean isNamed(Class<E> type, String name) {
    return named(type, name, null) != null;
  }

  private static <E extends Enum<E>> E named(Class<E> type, String name, E otherwise) {
    for (E value : type.getEnumConstants()) {
      if (value.name().equals(name)) {
        return value;
      }
    }
    return otherwise;
  }
}
