package dev.kvgrpc.client;

import dev.kvgrpc.v1.WaitCondition;
import dev.kvgrpc.v1.WaitTransferRequest;
import dev.kvgrpc.v1.WaitTransferResponse;
import java.time.Duration;

/** Waits for one transfer, longer than one WaitTransfer may take. */
final class Waiting {
  /** Of one call: half of what a server allows, so that proxies with a limit of a minute let it pass. */
  private static final long ONCE_NANOS = Duration.ofSeconds(30).toNanos();

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
      long left = until - System.nanoTime();
      try {
        WaitTransferResponse reply = once(Math.max(Math.min(left, ONCE_NANOS), 0));
        if (reply.getConditionMet() || System.nanoTime() - until >= 0) {
          return reply;
        }
        pauses.reset();
      } catch (KvgrpcException error) {
        left = until - System.nanoTime();
        if (!isPassing(error) || left <= 0) {
          throw error;
        }
        sleep(Math.min(pauses.nextNanos(error.retryDelay()), left));
      }
    }
  }

  private WaitTransferResponse once(long nanos) {
    Duration wait = Duration.ofNanos(nanos);
    return KvgrpcClient.call(
        client.transfers()::waitTransfer, request.toBuilder().setTimeout(Durations.toProto(wait)).build());
  }

  private boolean isPassing(KvgrpcException error) {
    return switch (error.code()) {
      case UNAVAILABLE, DEADLINE_EXCEEDED -> !client.isClosed();
      // Of a connection that was cut, or a proxy that reset the call.
      case CANCELLED, INTERNAL, UNKNOWN -> !error.isServers() && !client.isClosed();
      default -> false;
    };
  }

  private static void sleep(long nanos) {
    try {
      Thread.sleep(Duration.ofNanos(nanos).toMillis() + 1);
    } catch (InterruptedException interrupted) {
      throw Pauses.interrupted(interrupted);
    }
  }
}
