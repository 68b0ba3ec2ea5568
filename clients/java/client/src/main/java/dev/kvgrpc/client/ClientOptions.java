package dev.kvgrpc.client;

import io.grpc.ChannelCredentials;
import io.grpc.InsecureChannelCredentials;
import java.nio.file.Path;
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
 * @param metadata metadata of every call
 * @param token returns the bearer token of every call; empty for none
 * @param traceparent returns the W3C context of every call, in the thread that makes the call; null or empty for none
 */
public record ClientOptions(
    Duration timeout,
    ChannelCredentials credentials,
    Map<String, String> metadata,
    Supplier<String> token,
    Supplier<String> traceparent) {

  /** Checks the options. */
  public ClientOptions {
    if (timeout.isZero() || timeout.isNegative()) {
      throw new IllegalArgumentException("every call has a deadline: a timeout is positive, not " + timeout);
    }
    metadata = Map.copyOf(metadata);
  }

  /** Returns the default options: 10 s, not encrypted, no metadata, no token, no trace. */
  public static ClientOptions defaults() {
    return new ClientOptions(Duration.ofSeconds(10), InsecureChannelCredentials.create(), Map.of(), () -> "", () -> "");
  }

  /** Omits the token and the values of the metadata, because they may be secrets. */
  @Override
  public String toString() {
    return "ClientOptions[timeout=" + timeout + ", metadata=" + new TreeSet<>(metadata.keySet()) + "]";
  }

  /** Returns the options with another deadline. */
  public ClientOptions withTimeout(Duration timeout) {
    return new ClientOptions(timeout, credentials, metadata, token, traceparent);
  }

  /** Returns the options with TLS: the files are read now, and again for each new connection. */
  public ClientOptions withTls(TlsFiles files) {
    return withCredentials(files.credentials());
  }

  /** Returns the options with a bearer token, which every call carries. */
  public ClientOptions withToken(String token) {
    String checked = BearerToken.checked(token);
    return new ClientOptions(timeout, credentials, metadata, () -> checked, traceparent);
  }

  /** Returns the options with the bearer token of a file, which is read again once a second. */
  public ClientOptions withTokenFile(Path file) {
    return new ClientOptions(timeout, credentials, metadata, new BearerToken(file), traceparent);
  }

  /** Returns the options with other credentials. */
  public ClientOptions withCredentials(ChannelCredentials credentials) {
    return new ClientOptions(timeout, credentials, metadata, token, traceparent);
  }

  /** Returns the options with other metadata. */
  public ClientOptions withMetadata(Map<String, String> metadata) {
    return new ClientOptions(timeout, credentials, metadata, token, traceparent);
  }

  /** Returns the options with a trace context. */
  public ClientOptions withTraceparent(Supplier<String> traceparent) {
    return new ClientOptions(timeout, credentials, metadata, token, traceparent);
  }
}
