package dev.kvgrpc.client;

import dev.kvgrpc.v1.ResponseHeader;
import dev.kvgrpc.v1.TransferFilter;
import dev.kvgrpc.v1.TransferServiceGrpc;
import dev.kvgrpc.v1.WatchTransfersRequest;
import dev.kvgrpc.v1.WatchTransfersResponse;
import java.time.Duration;
import java.util.Optional;

/**
 * Watches the changes of transfers over streams that break. No message is repeated or lost.
 *
 * <p>Messages are the server's. The first message says that the watch is open and has no transfer. Messages that only
 * state the server's progress have no transfer either. A message with {@code history_lost} says that changes before it
 * are missing: list the transfers. The watch continues after it. The watch ends with INCARNATION_CHANGED when its life
 * is over, because the transfers of that life are gone.
 *
 * <p>One thread reads, and any thread may close. Nothing runs in the background: a watch connects only while it is
 * read.
 */
public final class TransferWatch extends ReconnectingStream<WatchTransfersRequest, WatchTransfersResponse> {
  private final TransferFilter filter;
  private long eventSeq;
  private long incarnation;
  private boolean told;

  /** The point at which a watch begins: after an event of a life. */
  public record After(long eventSeq, long incarnation) {
    /** The present, in any life. */
    public static final After PRESENT = new After(0, 0);

    /** Returns the point up to which a reply reports everything, of a list or of a call that made a transfer. */
    public static After of(ResponseHeader header) {
      return new After(header.getEventSeq(), header.getIncarnation());
    }
  }

  TransferWatch(KvgrpcClient client, TransferFilter filter, After after) {
    super(client, TransferServiceGrpc.getWatchTransfersMethod());
    this.filter = filter;
    this.eventSeq = after.eventSeq();
    this.incarnation = after.incarnation();
  }

  /** Returns the next message. */
  public WatchTransfersResponse next() {
    return next(Duration.ofDays(36_500)).orElseThrow();
  }

  /** Returns the next message; empty after the timeout. The watch continues then. */
  public Optional<WatchTransfersResponse> next(Duration timeout) {
    long until = after(timeout);
    while (true) {
      Step<WatchTransfersResponse> step = step(until);
      if (step == null) {
        return Optional.empty();
      }
      if (step.message() != null && take(step.message(), step.first())) {
        return Optional.of(step.message());
      }
    }
  }

  /** Returns where another watch would continue. */
  public After position() {
    return new After(eventSeq, incarnation);
  }

  private boolean take(WatchTransfersResponse message, boolean first) {
    ResponseHeader header = message.getHeader();
    if (incarnation != 0 && header.getIncarnation() != incarnation) {
      throw fail(KvgrpcException.incarnationChanged(header));
    }
    // The start of a later stream is not reported.
    boolean news = !told || !first || message.hasTransfer() || message.getHistoryLost();
    told = true;
    incarnation = header.getIncarnation();
    eventSeq = Math.max(eventSeq, header.getEventSeq());
    return news;
  }

  @Override
  WatchTransfersRequest request() {
    return WatchTransfersRequest.newBuilder()
        .setFilter(filter)
        .setAfterEventSeq(eventSeq)
        .setIncarnation(incarnation)
        .build();
  }

  @Override
  boolean isPassing(KvgrpcException error) {
    return error.isPassing();
  }

  @Override
  Duration silence() {
    // Nothing may change for days. Pings detect a dead connection.
    return Duration.ofDays(36_500);
  }
}
