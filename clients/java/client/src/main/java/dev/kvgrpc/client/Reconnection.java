package dev.kvgrpc.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ConnectivityState;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import java.time.Duration;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Reconnects when a call is made. gRPC's own pause after a refused connection grows to two minutes, and every call in
 * it fails at once. A server that restarts is back in seconds.
 */
final class Reconnection implements ClientInterceptor {
  private static final long PAUSE_NANOS = Duration.ofMillis(100).toNanos();

  private final ManagedChannel connection;
  private final AtomicLong next = new AtomicLong(System.nanoTime());

  Reconnection(ManagedChannel connection) {
    this.connection = connection;
  }

  @Override
  public <Q, R> ClientCall<Q, R> interceptCall(MethodDescriptor<Q, R> method, CallOptions call, Channel channel) {
    long now = System.nanoTime();
    long due = next.get();
    if (connection.getState(false) == ConnectivityState.TRANSIENT_FAILURE
        && now - due >= 0
        && next.compareAndSet(due, now + PAUSE_NANOS)) {
      connection.resetConnectBackoff();
    }
    return channel.newCall(method, call);
  }
}
