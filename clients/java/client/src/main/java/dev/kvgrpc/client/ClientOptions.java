package dev.kvgrpc.client;

import io.grpc.ChannelCredentials;
import io.grpc.InsecureChannelCredentials;
import java.time.Duration;
import java.util.Map;
import java.util.TreeSet;
import java.util.function.Supplier;

/**
 * Options of a connection.
 *
 * @param timeout deadline of a call that states none, retries included; the wait of a call that waits at the server is
 *     added
 * @param credentials credentials of the channel; not encrypted by default
 * @param metadata metadata of every call, for example an {@code authorization}
 * @param traceparent returns the W3C context of every call, in the thread that makes the call; null or empty for none
 */
public record ClientOptions(
    Duration timeout, ChannelCredentials credentials, Map<String, String> metadata, Supplier<String> traceparent) {

  /** Checks the options. */
  public ClientOptions {
    if (timeout.isZero() || timeout.isNegative()) {
      throw new IllegalArgumentException("every call has a deadline: a timeout is positive, not " + timeout);
    }
    metadata = Map.copyOf(metadata);
  }

  /** Returns the default options: 10 s, not encrypted, no metadata, no trace. */
  public static ClientOptions defaults() {
    return new ClientOptions(Duration.ofSeconds(10), InsecureChannelCredentials.create(), Map.of(), () -> "");
  }

  /** Omits the values of the metadata, because they may be secrets. */
  @Override
  public String toString() {
    return "ClientOptions[timeout=" + timeout + ", metadata=" + new TreeSet<>(metadata.keySet()) + "]";
  }

  /** Returns the options with another deadline. */
  public ClientOptions withTimeout(Duration timeout) {
    return new ClientOptions(timeout, credentials, metadata, traceparent);
  }

  /** Returns the options with other credentials, for example for TLS. */
  public ClientOptions withCredentials(ChannelCredentials credentials) {
    return new ClientOptions(timeout, credentials, metadata, traceparent);
  }

  /** Returns the options with other metadata. */
  public ClientOptions withMetadata(Map<String, String> metadata) {
    return new ClientOptions(timeout, credentials, metadata, traceparent);
  }

  /** Returns the options with a trace context. */
  public ClientOptions withTraceparent(Supplier<String> traceparent) {
    return new ClientOptions(timeout, credentials, metadata, traceparent);
  }
}
