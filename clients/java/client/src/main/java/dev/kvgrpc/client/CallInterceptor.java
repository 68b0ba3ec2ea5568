package dev.kvgrpc.client;

import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import dev.kvgrpc.v1.AdminServiceGrpc;
import dev.kvgrpc.v1.GetTensorRequest;
import dev.kvgrpc.v1.HandshakeServiceGrpc;
import dev.kvgrpc.v1.PollSchedulerNewsRequest;
import dev.kvgrpc.v1.PullBlocksRequest;
import dev.kvgrpc.v1.PutTensorRequest;
import dev.kvgrpc.v1.ReserveBlocksRequest;
import dev.kvgrpc.v1.TransferWait;
import dev.kvgrpc.v1.WaitTransferRequest;
import dev.kvgrpc.v1.WaitTransfersRequest;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall.SimpleForwardingClientCall;
import io.grpc.ForwardingClientCallListener.SimpleForwardingClientCallListener;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.Status;
import java.time.Duration;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.TimeUnit;

/** Gives every unary call its deadline and its idempotency key, and every call its metadata. */
final class CallInterceptor implements ClientInterceptor {
  /** Longest time that a server lets a call wait. A wait without a timeout means the same. */
  static final Duration WAIT_MAX = Duration.ofSeconds(60);

  /**
   * Calls with a deadline of at least one minute. ConnectPeer lets two leads shake hands, which may take a whole
   * connect timeout at each of them. ReleaseQuarantine lets transfers in flight end.
   */
  private static final Set<String> LONG_CALLS = Set.of(
      HandshakeServiceGrpc.getConnectPeerMethod().getFullMethodName(),
      AdminServiceGrpc.getReleaseQuarantineMethod().getFullMethodName());

  private static final Duration LONG_CALL = Duration.ofSeconds(60);

  /**
   * Default wait of PutTensor, which returns when its consumers have the tensor. Without a timeout in the request the
   * server waits two minutes. A stated timeout is limited to the longest life of a lease.
   */
  private static final Duration PUT_TENSOR = Duration.ofSeconds(120);

  private static final Duration PUT_TENSOR_MAX = Duration.ofSeconds(600);

  private final ClientOptions options;

  CallInterceptor(ClientOptions options) {
    this.options = options;
  }

  @Override
  public <Q, R> ClientCall<Q, R> interceptCall(MethodDescriptor<Q, R> method, CallOptions call, Channel next) {
    if (method.getType() == MethodType.UNARY) {
      return new UnaryCall<>(method, call, next);
    }
    return new SimpleForwardingClientCall<>(next.newCall(method, call)) {
      @Override
      public void start(Listener<R> listener, Metadata headers) {
        super.start(new Noting<>(listener, called(method, next, "")), withMetadata(headers));
      }
    };
  }

  /** Returns how long a call with this request may take. */
  Duration timeout(MethodDescriptor<?, ?> method, Object request) {
    if (LONG_CALLS.contains(method.getFullMethodName())) {
      return options.timeout().compareTo(LONG_CALL) > 0 ? options.timeout() : LONG_CALL;
    }
    return options.timeout().plus(wait(request));
  }

  private static Duration wait(Object request) {
    if (request instanceof WaitTransferRequest wait) {
      return atMost(wait.hasTimeout() ? Durations.toJava(wait.getTimeout()) : WAIT_MAX);
    }
    if (request instanceof WaitTransfersRequest wait) {
      return atMost(wait.hasTimeout() ? Durations.toJava(wait.getTimeout()) : WAIT_MAX);
    }
    if (request instanceof PullBlocksRequest pull && pull.hasWait()) {
      return inCall(pull.getWait());
    }
    if (request instanceof ReserveBlocksRequest reserve && reserve.hasWait()) {
      return inCall(reserve.getWait());
    }
    if (request instanceof PollSchedulerNewsRequest poll) {
      return atMost(Durations.toJava(poll.getWait()));
    }
    if (request instanceof GetTensorRequest get) {
      return atMost(get.hasTimeout() ? Durations.toJava(get.getTimeout()) : WAIT_MAX);
    }
    if (request instanceof PutTensorRequest put) {
      Duration stated = put.hasTimeout() ? Durations.toJava(put.getTimeout()) : PUT_TENSOR;
      return stated.compareTo(PUT_TENSOR_MAX) < 0 ? stated : PUT_TENSOR_MAX;
    }
    return Duration.ZERO;
  }

  private static Duration inCall(TransferWait wait) {
    return atMost(wait.hasTimeout() ? Durations.toJava(wait.getTimeout()) : WAIT_MAX);
  }

  private static Duration atMost(Duration wait) {
    return Duration.ofNanos(Math.min(Durations.nanos(wait), WAIT_MAX.toNanos()));
  }

  /**
   * Returns the request with a random key, where it has the field and leaves it empty. gRPC's own retries send the same
   * key.
   */
  @SuppressWarnings("unchecked")
  static <Q> Q withKey(Q request) {
    if (!(request instanceof Message message)) {
      return request;
    }
    FieldDescriptor key = message.getDescriptorForType().findFieldByName("idempotency_key");
    if (key == null || !message.getField(key).equals("")) {
      return request;
    }
    return (Q) message.toBuilder().setField(key, UUID.randomUUID().toString()).build();
  }

  private static String keyOf(Object request) {
    FieldDescriptor key = request instanceof Message message
        ? message.getDescriptorForType().findFieldByName("idempotency_key")
        : null;
    return key == null ? "" : ((Message) request).getField(key).toString();
  }

  private static Called called(MethodDescriptor<?, ?> method, Channel channel, String key) {
    return new Called(method.getFullMethodName().replace("kvgrpc.v1.", ""), channel.authority(), key);
  }

  /** Adds the call to the trailers of a call that failed. */
  private static final class Noting<R> extends SimpleForwardingClientCallListener<R> {
    private final Called called;

    Noting(ClientCall.Listener<R> listener, Called called) {
      super(listener);
      this.called = called;
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      if (!status.isOk()) {
        called.noteIn(trailers);
      }
      super.onClose(status, trailers);
    }
  }

  private Metadata withMetadata(Metadata headers) {
    options.metadata().forEach((name, value) -> putIfAbsent(headers, name, value));
    String token = options.token().get();
    if (token != null && !token.isEmpty()) {
      putIfAbsent(headers, "authorization", "Bearer " + token);
    }
    String traceparent = options.traceparent().get();
    if (traceparent != null && !traceparent.isEmpty()) {
      putIfAbsent(headers, "traceparent", traceparent);
    }
    return headers;
  }

  private static void putIfAbsent(Metadata headers, String name, String value) {
    Metadata.Key<String> key = Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
    if (!headers.containsKey(key)) {
      headers.put(key, value);
    }
  }

  /** A call that begins with its request, because its deadline depends on the request. */
  private final class UnaryCall<Q, R> extends ClientCall<Q, R> {
    private final MethodDescriptor<Q, R> method;
    private final CallOptions call;
    private final Channel next;
    private Listener<R> listener;
    private Metadata headers;
    private int requested;
    private boolean compressed = true;
    private volatile ClientCall<Q, R> begun;

    UnaryCall(MethodDescriptor<Q, R> method, CallOptions call, Channel next) {
      this.method = method;
      this.call = call;
      this.next = next;
    }

    @Override
    public void start(Listener<R> listener, Metadata headers) {
      this.listener = listener;
      this.headers = withMetadata(headers);
    }

    @Override
    public void sendMessage(Q message) {
      CallOptions timed = call.getDeadline() != null
          ? call
          : call.withDeadlineAfter(timeout(method, message).toNanos(), TimeUnit.NANOSECONDS);
      Q keyed = withKey(message);
      begun = next.newCall(method, timed);
      begun.start(new Noting<>(listener, called(method, next, keyOf(keyed))), headers);
      begun.setMessageCompression(compressed);
      begun.request(requested);
      begun.sendMessage(keyed);
    }

    @Override
    public void request(int count) {
      if (begun == null) {
        requested += count;
      } else {
        begun.request(count);
      }
    }

    @Override
    public void halfClose() {
      begun.halfClose();
    }

    @Override
    public void cancel(String message, Throwable cause) {
      if (begun != null) {
        begun.cancel(message, cause);
      } else if (listener != null) {
        listener.onClose(Status.CANCELLED.withDescription(message).withCause(cause), new Metadata());
      }
    }

    @Override
    public void setMessageCompression(boolean enabled) {
      compressed = enabled;
    }
  }
}
