package dev.kvgrpc.client;

import dev.kvgrpc.v1.ResponseHeader;
import dev.kvgrpc.v1.TransferFilter;
import dev.kvgrpc.v1.TransferServiceGrpc;
import dev.kvgrpc.v1.WatchTransfersRequest;
import dev.kvgrpc.v1.WatchTransfersResponse;
import java.time.Duration;
import java.util.Optional;

/**
 * Changes of transfers, over streams that break: what was read is neither repeated nor lost.
 *
 * <p>Messages are the server's. The first says that the watch stands, and has no transfer; so have those that only tell
 * how far the server is. One with {@code history_lost} says that changes before it are missing: list the transfers. The
 * watch goes on after it. It ends with INCARNATION_CHANGED when the life that it is of is over, since all that was known of
 * that life's transfers is gone.
 *
 * <p>One thread reads, any may close. Nothing runs in between: a watch that nobody reads connects to nobody.
 */
public final class TransferWatch extends ReconnectingStream<WatchTransfersRequest, WatchTransfersResponse> {
  private final TransferFilter filter;
  private long eventSeq;
  private long incarnation;
  private boolean told;

  /** Where a watch begins: after an event of a life. */
  public record After(long eventSeq, long incarnation) {
    /** Now, whichever life it is. */
    public static final After PRESENT = new After(0, 0);

    /** After all that a reply says: of a list, or of a call that made a transfer. */
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

  /** The next message. */
  public WatchTransfersResponse next() {
    return next(Duration.ofDays(36_500)).orElseThrow();
  }

  /** The next message; empty after that time. The watch stands then. */
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

  /** Where another watch would go on. */
  public After position() {
    return new After(eventSeq, incarnation);
  }

  private boolean take(WatchTransfersResponse message, boolean first) {
    ResponseHeader header = message.getHeader();
    if (incarnation != 0 && header.getIncarnation() != incarnation) {
      throw fail(KvgrpcException.incarnationChanged(header));
    }
    // That a later stream stands is no news.
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
    return switch (error.code()) {
      case UNAVAILABLE, DEADLINE_EXCEEDED -> true;
      case RESOURCE_EXHAUSTED -> !error.isTooLarge();
      // Of a connection that was cut, or a proxy that reset the stream.
      case CANCELLED, INTERNAL, UNKNOWN -> !error.isServers();
      default -> false;
    };
  }

  @Override
  Duration silence() {
    // Nothing may change for days. A connection that is dead is found out by pings.
    return Duration.ofDays(36_500);
  }
}
