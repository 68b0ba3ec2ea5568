package dev.kvgrpc.client;

import com.google.protobuf.Any;
import com.google.protobuf.Message;
import com.google.rpc.ErrorInfo;
import dev.kvgrpc.v1.ResponseHeader;
import io.grpc.BindableService;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.protobuf.StatusProto;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.InetSocketAddress;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/** A server on a loopback port that plays kvgrpc. Each test implements its services. */
final class FakeServer implements AutoCloseable {
  static final Metadata.Key<String> TRACEPARENT = key("traceparent");
  static final long LIFE = 77;

  /** Every call that arrived. */
  record Arrival(String method, Metadata headers, double deadlineS) {}

  final BlockingQueue<Arrival> arrivals = new LinkedBlockingQueue<>();
  private final BindableService[] services;
  private Server server;
  private int port;

  FakeServer(BindableService... services) {
    this.services = services;
    start();
  }

  /** Starts the server at the port that it had. */
  void start() {
    NettyServerBuilder builder = NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", port));
    for (BindableService service : services) {
      builder.addService(service);
    }
    try {
      server = builder.intercept(new Recorder()).build().start();
    } catch (IOException failed) {
      throw new UncheckedIOException(failed);
    }
    port = server.getPort();
  }

  /** Cuts every connection and accepts no new one. */
  void stop() {
    server.shutdownNow();
    try {
      server.awaitTermination(10, TimeUnit.SECONDS);
    } catch (InterruptedException interrupted) {
      throw new IllegalStateException(interrupted);
    }
  }

  String address() {
    return "127.0.0.1:" + port;
  }

  KvgrpcClient client() {
    return KvgrpcClient.connect(address());
  }

  Arrival arrival() {
    return take(arrivals);
  }

  @Override
  public void close() {
    stop();
  }

  static <T> T take(BlockingQueue<T> queue) {
    try {
      T taken = queue.poll(20, TimeUnit.SECONDS);
      if (taken == null) {
        throw new AssertionError("nothing came within 20 s");
      }
      return taken;
    } catch (InterruptedException interrupted) {
      throw new IllegalStateException(interrupted);
    }
  }

  static ResponseHeader header(long eventSeq) {
    return ResponseHeader.newBuilder().setEngineId("P").setIncarnation(LIFE).setEventSeq(eventSeq).build();
  }

  static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }

  /** Returns a status as a kvgrpc server makes it. */
  static StatusRuntimeException refusal(Status.Code code, String reason, String next, Message... more) {
    ErrorInfo info = ErrorInfo.newBuilder()
        .setDomain("kvgrpc.dev")
        .setReason(reason)
        .putAllMetadata(Map.of("next", next, "engine_id", "P", "incarnation", "77", "group", "0"))
        .build();
    com.google.rpc.Status.Builder status = com.google.rpc.Status.newBuilder()
        .setCode(code.value())
        .setMessage(reason + ": it was refused")
        .addDetails(Any.pack(info));
    for (Message detail : more) {
      status.addDetails(Any.pack(detail));
    }
    return StatusProto.toStatusRuntimeException(status.build());
  }

  private final class Recorder implements ServerInterceptor {
    @Override
    public <Q, R> ServerCall.Listener<Q> interceptCall(
        ServerCall<Q, R> call, Metadata headers, ServerCallHandler<Q, R> next) {
      var deadline = Context.current().getDeadline();
      double left = deadline == null ? Double.POSITIVE_INFINITY : deadline.timeRemaining(TimeUnit.MILLISECONDS) / 1e3;
      arrivals.add(new Arrival(call.getMethodDescriptor().getBareMethodName(), headers, left));
      return next.startCall(call, headers);
    }
  }
}
