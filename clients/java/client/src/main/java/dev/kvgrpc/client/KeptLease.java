package dev.kvgrpc.client;

import dev.kvgrpc.v1.FailureReason;
import dev.kvgrpc.v1.LeaseRef;
import dev.kvgrpc.v1.LeaseState;
import dev.kvgrpc.v1.RenewedLease;
import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;

/** A lease that a {@link LeaseKeeper} renews. */
public final class KeptLease {
  private static final long PAUSE_MIN_NANOS = Duration.ofMillis(100).toNanos();
  private static final long PAUSE_REFUSED_NANOS = Duration.ofSeconds(1).toNanos();

  private final LeaseRef ref;
  private final CompletableFuture<End> over = new CompletableFuture<>();
  private boolean answered;
  private long leftUntil;
  private long due;

  /**
   * The end of a lease.
   *
   * @param state EXPIRED, RELEASED, DONE, VOIDED or LOST; UNSPECIFIED for a lease that the server does not know;
   *     UNRECOGNIZED for a lease that could not be renewed, in a state that this version does not know
   * @param reason why the lease could not be renewed
   * @param error error of the last attempt, where no answer came or the server refused the whole call; otherwise null
   */
  public record End(LeaseState state, FailureReason reason, KvgrpcException error) {}

  KeptLease(LeaseRef ref, long now) {
    this.ref = ref;
    this.due = now;
  }

  /** Returns the reference of the lease. */
  public LeaseRef ref() {
    return ref;
  }

  /** Completes when the lease is over. It is cancelled when the keeper stops before that. */
  public CompletableFuture<End> over() {
    return over;
  }

  /** Returns LIVE, or how the lease ended. A lease without an answer counts as live. */
  public LeaseState state() {
    return over.isDone() && !over.isCancelled() ? over.join().state() : LeaseState.LEASE_STATE_LIVE;
  }

  /**
   * Returns the remaining time; empty before the first answer. It counts from the moment when the renewal was sent, so
   * that a holder never relies on a lease longer than its server does.
   */
  public synchronized Optional<Duration> remaining() {
    if (!answered) {
      return Optional.empty();
    }
    long left = over.isDone() ? 0 : Math.max(leftUntil - System.nanoTime(), 0);
    return Optional.of(Duration.ofNanos(left));
  }

  /** Returns when the lease must be renewed next. */
  synchronized long due() {
    return due;
  }

  /** Returns when the lease is over unless it is renewed; long after {@code now} before the first answer. */
  synchronized long leftUntil(long now) {
    return answered ? leftUntil : now + Duration.ofDays(1).toNanos();
  }

  /** Takes the server's answer to a renewal that was sent at {@code sent}. */
  synchronized void take(RenewedLease row, long sent) {
    boolean refused = row.getReason() != FailureReason.FAILURE_REASON_UNSPECIFIED;
    long remaining = Durations.nanos(Durations.toJava(row.getRemaining()));
    // An unknown state is not an end. But a lease that could not be renewed may be renewed later only if it is LIVE.
    boolean lost = refused && row.getState() != LeaseState.LEASE_STATE_LIVE;
    if (States.isOver(row.getState()) || lost) {
      FailureReason reason = row.getReason() == FailureReason.UNRECOGNIZED
          ? FailureReason.FAILURE_REASON_INTERNAL
          : row.getReason();
      end(new End(row.getState(), reason, null));
      return;
    }
    if (!refused) {
      answered = true;
      leftUntil = sent + remaining;
    }
    due = sent + (refused ? PAUSE_REFUSED_NANOS : Math.max(remaining / 3, PAUSE_MIN_NANOS));
  }

  /** Ends the lease when its time is over by this process's own clock: in doubt, a holder must not rely on it. */
  synchronized void expire(long now, KvgrpcException last) {
    if (answered && now - leftUntil >= 0) {
      end(new End(LeaseState.LEASE_STATE_EXPIRED, FailureReason.FAILURE_REASON_LEASE_EXPIRED, last));
    }
  }

  /** Ends the lease: the server refused the whole call, and would refuse it again. */
  void refuse(KvgrpcException error) {
    end(new End(LeaseState.LEASE_STATE_UNSPECIFIED, error.failureReason(), error));
  }

  boolean isOver() {
    return over.isDone();
  }

  void stop() {
    over.cancel(false);
  }

  private void end(End end) {
    over.complete(end);
  }

  static KvgrpcException silent(Duration timeout) {
    return KvgrpcException.of(Status.DEADLINE_EXCEEDED.withDescription("no answer to a renewal within " + timeout));
  }
}
