package dev.kvgrpc.client;

import dev.kvgrpc.v1.WaitCondition;
import dev.kvgrpc.v1.WaitTransferRequest;
import dev.kvgrpc.v1.WaitTransferResponse;
import io.grpc.Context;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.TimeUnit;

/** Waits for one transfer, for longer than one WaitTransfer may take. */
final class Waiting {
  /** Wait of one call: half of what a server allows, so that proxies with a limit of one minute let it pass. */
  private static final long ONCE_NANOS = Duration.ofSeconds(30).toNanos();

  /** Interval in a pause at which the wait checks whether it may continue. */
  private static final long LOOK_NANOS = Duration.ofMillis(100).toNanos();

  private final KvgrpcClient client;
  private final WaitTransferRequest request;
  private final Pauses pauses = new Pauses();

  Waiting(KvgrpcClient client, String transferId, WaitCondition until) {
    this.client = client;
    this.request = WaitTransferRequest.newBuilder().setTransferId(transferId).setUntil(until).build();
  }

  WaitTransferResponse run(Duration timeout) {
    long until = System.nanoTime() + Durations.nanos(timeout);
    while (true) {
      long begun = System.nanoTime();
      long once = Math.max(Math.min(until - begun, ONCE_NANOS), 0);
      try {
        WaitTransferResponse reply = once(once);
        if (reply.getConditionMet() || System.nanoTime() - until >= 0) {
          return reply;
        }
        if (System.nanoTime() - begun >= once / 2) {
          pauses.reset();
        } else {
          // The server may answer early. The pause prevents a busy loop.
          pause(until, Optional.empty());
        }
      } catch (KvgrpcException error) {
        if (!isPassing(error) || System.nanoTime() - until >= 0) {
          throw error;
        }
        pause(until, error.retryDelay());
      }
    }
  }

  private WaitTransferResponse once(long nanos) {
    Duration wait = Duration.ofNanos(nanos);
    return KvgrpcClient.call(
        client.transfers()::waitTransfer, request.toBuilder().setTimeout(Durations.toProto(wait)).build());
  }

  private boolean isPassing(KvgrpcException error) {
    return !isEnded() && error.isPassing();
  }

  /** Returns whether no call can be made any more: the client is closed, or the call that contains the wait is over. */
  private boolean isEnded() {
    return client.isClosed() || Context.current().isCancelled();
  }

  private void pause(long until, Optional<Duration> asked) {
    long begun = System.nanoTime();
    long pause = Math.min(pauses.nextNanos(asked), until - begun);
    try {
      for (long left = pause; left > 0 && !isEnded(); left = begun + pause - System.nanoTime()) {
        TimeUnit.NANOSECONDS.sleep(Math.min(left, LOOK_NANOS));
      }
    } catch (InterruptedException interrupted) {
      throw Pauses.interrupted(interrupted);
    }
  }
}
