package dev.kvgrpc.client;

import dev.kvgrpc.v1.HandshakeServiceGrpc;
import dev.kvgrpc.v1.WatchEngineRequest;
import dev.kvgrpc.v1.WatchEngineResponse;
import java.time.Duration;
import java.util.Optional;

/**
 * Watches an engine over all of its lives. It reconnects without limit. It reports once for each outage that the engine
 * cannot be reached; the next status reports that it can. A status with another incarnation says that the leases,
 * grants and transfers of the previous life are gone.
 *
 * <p>One thread reads, and any thread may close.
 */
public final class EngineWatch extends ReconnectingStream<WatchEngineRequest, WatchEngineResponse> {
  /** Silence after which a server counts as away. A server sends a message at least every 5 s. */
  private static final Duration SILENCE = Duration.ofSeconds(15);

  private final WatchEngineRequest request;
  private boolean unreachable;

  /** One item of a watch. */
  public sealed interface News permits Status, Unreachable {}

  /** The present status of the engine. */
  public record Status(WatchEngineResponse message) implements News {}

  /** The engine cannot be reached now: give it no work. */
  public record Unreachable(KvgrpcException error) implements News {}

  EngineWatch(KvgrpcClient client, Duration minInterval) {
    super(client, HandshakeServiceGrpc.getWatchEngineMethod());
    WatchEngineRequest.Builder builder = WatchEngineRequest.newBuilder();
    request = (minInterval == null ? builder : builder.setMinInterval(Durations.toProto(minInterval))).build();
  }

  /** Returns the next item. */
  public News next() {
    return next(Duration.ofDays(36_500)).orElseThrow();
  }

  /** Returns the next item; empty after the timeout. The watch continues then. */
  public Optional<News> next(Duration timeout) {
    long until = after(timeout);
    while (true) {
      Step<WatchEngineResponse> step = step(until);
      if (step == null) {
        return Optional.empty();
      }
      if (step.message() != null) {
        unreachable = false;
        return Optional.of(new Status(step.message()));
      }
      if (!unreachable) {
        unreachable = true;
        return Optional.of(new Unreachable(step.broken()));
      }
    }
  }

  @Override
  WatchEngineRequest request() {
    return request;
  }

  @Override
  boolean isPassing(KvgrpcException error) {
    return switch (error.code()) {
      // Every other stream would get the same answer.
      case INVALID_ARGUMENT, UNIMPLEMENTED, PERMISSION_DENIED, UNAUTHENTICATED -> false;
      default -> true;
    };
  }

  @Override
  Duration silence() {
    return SILENCE;
  }
}
