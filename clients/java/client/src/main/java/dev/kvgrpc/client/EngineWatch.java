package dev.kvgrpc.client;

import dev.kvgrpc.v1.HandshakeServiceGrpc;
import dev.kvgrpc.v1.WatchEngineRequest;
import dev.kvgrpc.v1.WatchEngineResponse;
import java.time.Duration;
import java.util.Optional;

/**
 * How an engine is, over all of its lives. It is reconnected for ever, and says once of each outage that the engine cannot be
 * reached; the next status says that it can. A status of another incarnation says that the leases, grants and transfers
 * of the one before are gone.
 *
 * <p>One thread reads, any may close.
 */
public final class EngineWatch extends ReconnectingStream<WatchEngineRequest, WatchEngineResponse> {
  /** A server says something at least every 5 s. */
  private static final Duration SILENCE = Duration.ofSeconds(15);

  private final WatchEngineRequest request;
  private boolean unreachable;

  /** What a watch tells. */
  public sealed interface News permits Status, Unreachable {}

  /** The engine as it is now. */
  public record Status(WatchEngineResponse message) implements News {}

  /** The engine cannot be reached now: give it no work. */
  public record Unreachable(KvgrpcException error) implements News {}

  EngineWatch(KvgrpcClient client, Duration minInterval) {
    super(client, HandshakeServiceGrpc.getWatchEngineMethod());
    WatchEngineRequest.Builder builder = WatchEngineRequest.newBuilder();
    request = (minInterval == null ? builder : builder.setMinInterval(Durations.toProto(minInterval))).build();
  }

  /** What is next. */
  public News next() {
    return next(Duration.ofDays(36_500)).orElseThrow();
  }

  /** What is next; empty after that time. The watch stands then. */
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
      // No other stream would be answered differently.
      case INVALID_ARGUMENT, UNIMPLEMENTED, PERMISSION_DENIED, UNAUTHENTICATED -> false;
      default -> true;
    };
  }

  @Override
  Duration silence() {
    return SILENCE;
  }
}
