package dev.kvgrpc.client;

import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.ThreadLocalRandom;

/**
 * Pauses between attempts: 0.1 s, doubled each time up to 2 s, with jitter so that many clients do not come at once.
 */
final class Pauses {
  /**
   * Time after which a connection counts as a recovery. After a shorter one the pauses keep growing, against busy
   * loops.
   */
  static final long LONGEST_NANOS = Duration.ofSeconds(2).toNanos();

  private static final long FIRST_NANOS = Duration.ofMillis(100).toNanos();

  private long next = FIRST_NANOS;

  /** Returns the next pause. The server's wish counts when it is longer. */
  long nextNanos(Optional<Duration> asked) {
    long pause = (long) (next * ThreadLocalRandom.current().nextDouble(0.5, 1.0));
    next = Math.min(2 * next, LONGEST_NANOS);
    return Math.max(pause, asked.map(Durations::nanos).orElse(0L));
  }

  void reset() {
    next = FIRST_NANOS;
  }

  /** Returns what a blocking method throws when its thread is interrupted. */
  static KvgrpcException interrupted(InterruptedException cause) {
    Thread.currentThread().interrupt();
    return KvgrpcException.of(Status.CANCELLED.withDescription("interrupted").withCause(cause));
  }
}
