package dev.kvgrpc.client;

import dev.kvgrpc.v1.KeepAliveRequest;
import dev.kvgrpc.v1.KeepAliveResponse;
import dev.kvgrpc.v1.LeaseRef;
import dev.kvgrpc.v1.LeaseServiceGrpc;
import io.grpc.Status;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.TimeoutException;

/**
 * Renews leases over one KeepAlive stream, in one thread, until it or its client is closed.
 *
 * <p>Rules:
 *
 * <ul>
 *   <li>A lease is renewed when a third of its remaining time has passed, so that two renewals may fail.
 *   <li>A lease that is over is dropped, and {@link KeptLease#over} tells how it ended. A lease that could not be
 *       renewed in time is dropped as well: it counts as expired, whatever its server knows.
 *   <li>A stream that breaks is opened again, after a growing pause. Closing a keeper ends no lease.
 * </ul>
 */
public final class LeaseKeeper implements AutoCloseable {
  private static final long TOGETHER_NANOS = Duration.ofMillis(250).toNanos();
  private static final long ANSWER_MAX_NANOS = Duration.ofSeconds(10).toNanos();
  private static final long ANSWER_MIN_NANOS = Duration.ofMillis(100).toNanos();

  /**
   * Largest number of leases in one message. A server takes 10,000, but at most 4 MB, and a grant has about 700 bytes.
   */
  private static final int BATCH_MAX = 5_000;

  private final KvgrpcClient client;
  private final Duration ttl;
  private final List<KeptLease> kept = new ArrayList<>();
  private final Pauses pauses = new Pauses();
  private MessageStream<KeepAliveRequest, KeepAliveResponse> stream;
  private KvgrpcException lastFailure;
  private long attemptAfter = System.nanoTime();
  private boolean closed;

  LeaseKeeper(KvgrpcClient client, Duration ttl) {
    this.client = client;
    this.ttl = ttl;
  }

  LeaseKeeper start() {
    Thread thread = new Thread(this::run, "kvgrpc lease renewals");
    thread.setDaemon(true);
    thread.start();
    return this;
  }

  /** Renews this lease too, from now on. */
  public synchronized KeptLease keep(LeaseRef ref) {
    if (closed) {
      throw new IllegalStateException("the keeper is closed");
    }
    KeptLease lease = new KeptLease(ref, System.nanoTime());
    kept.add(lease);
    notifyAll();
    return lease;
  }

  /** Stops renewing a lease. */
  public synchronized void drop(KeptLease lease) {
    if (kept.remove(lease)) {
      lease.stop();
    }
  }

  /** Returns the leases that are renewed. */
  public synchronized List<KeptLease> leases() {
    return List.copyOf(kept);
  }

  /** Stops renewing. */
  @Override
  public synchronized void close() {
    closed = true;
    notifyAll();
    client.forget(this);
    if (stream != null) {
      stream.close();
    }
  }

  private void run() {
    try {
      for (List<KeptLease> due = nextDue(); due != null; due = nextDue()) {
        renew(due);
      }
    } finally {
      // The keeper also closes after an error: no holder may rely on a lease that nobody renews.
      close();
      leases().forEach(KeptLease::stop);
    }
  }

  /** Waits until leases are due, and returns them. Null means that the keeper is closed. */
  private synchronized List<KeptLease> nextDue() {
    while (!closed && !client.isClosed()) {
      long now = System.nanoTime();
      kept.forEach(lease -> lease.expire(now, lastFailure));
      kept.removeIf(KeptLease::isOver);
      List<KeptLease> soon = kept.stream()
          .filter(lease -> lease.due() - now <= TOGETHER_NANOS)
          .sorted(Comparator.comparingLong(lease -> lease.due() - now))
          .limit(BATCH_MAX)
          .toList();
      if (!soon.isEmpty() && soon.get(0).due() - now <= 0 && attemptAfter - now <= 0) {
        return soon;
      }
      pause(now);
    }
    return null;
  }

  /** Waits for the next attempt, the end of a lease, or a wake-up by another thread. */
  private void pause(long now) {
    long longest = Duration.ofHours(1).toNanos();
    for (KeptLease lease : kept) {
      long attempt = Math.max(lease.due() - now, attemptAfter - now);
      longest = Math.min(longest, Math.min(attempt, lease.leftUntil(now) - now));
    }
    try {
      wait(Math.max(longest, 0) / 1_000_000 + 1);
    } catch (InterruptedException interrupted) {
      throw Pauses.interrupted(interrupted);
    }
  }

  private void renew(List<KeptLease> due) {
    long sent = System.nanoTime();
    long soonest = due.stream().mapToLong(lease -> lease.leftUntil(sent) - sent).min().orElseThrow();
    Duration timeout = Duration.ofNanos(Math.min(Math.max(soonest / 2, ANSWER_MIN_NANOS), ANSWER_MAX_NANOS));
    try {
      KeepAliveResponse reply = exchange(due, timeout);
      for (int i = 0; i < due.size(); i++) {
        due.get(i).take(reply.getLeases(i), sent);
      }
      lastFailure = null;
      pauses.reset();
    } catch (KvgrpcException error) {
      failed(error, due);
    }
  }

  private KeepAliveResponse exchange(List<KeptLease> due, Duration timeout) {
    KeepAliveRequest.Builder request = KeepAliveRequest.newBuilder();
    due.forEach(lease -> request.addLeases(lease.ref()));
    if (ttl != null) {
      request.setTtl(Durations.toProto(ttl));
    }
    MessageStream<KeepAliveRequest, KeepAliveResponse> standing = standing();
    standing.send(request.build());
    try {
      KeepAliveResponse reply = standing.next(timeout);
      if (reply == null) {
        throw KvgrpcException.of(Status.UNAVAILABLE.withDescription("the server ended the stream"));
      }
      if (reply.getLeasesCount() != due.size()) {
        String rows = due.size() + " leases were renewed with " + reply.getLeasesCount() + " rows";
        throw KvgrpcException.of(Status.INTERNAL.withDescription(rows));
      }
      return reply;
    } catch (TimeoutException silent) {
      throw KeptLease.silent(timeout);
    }
  }

  private synchronized MessageStream<KeepAliveRequest, KeepAliveResponse> standing() {
    if (stream == null) {
      stream = client.open(LeaseServiceGrpc.getKeepAliveMethod());
    }
    if (closed) {
      stream.close();
    }
    return stream;
  }

  private synchronized void failed(KvgrpcException error, List<KeptLease> due) {
    stream.close();
    stream = null;
    lastFailure = error;
    switch (error.code()) {
      // The same request would be refused again.
      case INVALID_ARGUMENT, OUT_OF_RANGE, UNIMPLEMENTED, PERMISSION_DENIED, UNAUTHENTICATED ->
          due.forEach(lease -> lease.refuse(error));
      default -> attemptAfter = System.nanoTime() + pauses.nextNanos(error.retryDelay());
    }
  }

  /** Returns the error of the last attempt, where it failed. */
  public synchronized Optional<KvgrpcException> lastFailure() {
    return Optional.ofNullable(lastFailure);
  }
}
