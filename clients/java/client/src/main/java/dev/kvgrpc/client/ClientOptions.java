package dev.kvgrpc.client;

import io.grpc.ChannelCredentials;
import io.grpc.InsecureChannelCredentials;
import java.time.Duration;
import java.util.Map;
import java.util.TreeSet;
import java.util.function.Supplier;

/**
 * How to connect.
 *
 * @param timeout deadline of a call that states none, repetitions included; of one that waits at the server, this and
 *     the wait
 * @param credentials of the channel; not encrypted by default
 * @param metadata sent with every call, for example an {@code authorization}
 * @param traceparent asked for the W3C context of every call, in the thread that makes it; null or empty: none
 */
public record ClientOptions(
    Duration timeout, ChannelCredentials credentials, Map<String, String> metadata, Supplier<String> traceparent) {

  /** Checks. */
  public ClientOptions {
    if (timeout.isZero() || timeout.isNegative()) {
      throw new IllegalArgumentException("every call has a deadline: a timeout is positive, not " + timeout);
    }
    metadata = Map.copyOf(metadata);
  }

  /** 10 s, not encrypted, no metadata, no trace. */
  public static ClientOptions defaults() {
    return new ClientOptions(Duration.ofSeconds(10), InsecureChannelCredentials.create(), Map.of(), () -> "");
  }

  /** Without the values of the metadata, which may be secrets. */
  @Override
  public String toString() {
    return "ClientOptions[timeout=" + timeout + ", metadata=" + new TreeSet<>(metadata.keySet()) + "]";
  }

  /** With another deadline. */
  public ClientOptions withTimeout(Duration timeout) {
    return new ClientOptions(timeout, credentials, metadata, traceparent);
  }

  /** With TLS, say. */
  public ClientOptions withCredentials(ChannelCredentials credentials) {
    return new ClientOptions(timeout, credentials, metadata, traceparent);
  }

  /** With other metadata. */
  public ClientOptions withMetadata(Map<String, String> metadata) {
    return new ClientOptions(timeout, credentials, metadata, traceparent);
  }

  /** With a trace context. */
  public ClientOptions withTraceparent(Supplier<String> traceparent) {
    return new ClientOptions(timeout, credentials, metadata, traceparent);
  }
}
