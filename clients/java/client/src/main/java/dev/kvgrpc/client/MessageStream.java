package dev.kvgrpc.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * One stream that is read by pulling: the server is asked for one message more whenever one was taken, so that a slow
 * reader holds its server up and not its own memory. One thread sends, one reads, any may close.
 */
public final class MessageStream<Q, R> implements AutoCloseable {
  private final BlockingQueue<Object> arrived = new LinkedBlockingQueue<>();
  private final CompletableFuture<Metadata> headers = new CompletableFuture<>();
  private final ClientCall<Q, R> call;
  private boolean closed;
  private End end;

  private record End(Status status, Metadata trailers) {}

  MessageStream(Channel channel, MethodDescriptor<Q, R> method) {
    call = channel.newCall(method, CallOptions.DEFAULT);
  }

  MessageStream<Q, R> start(Metadata metadata) {
    call.start(new Arrivals(), metadata);
    call.request(1);
    return this;
  }

  /** Sends a message; nothing on a stream that is closed, whose reader is told. */
  public synchronized void send(Q message) {
    if (!closed) {
      call.sendMessage(message);
    }
  }

  /** No message follows. */
  public synchronized void finish() {
    if (!closed) {
      call.halfClose();
    }
  }

  /** The server's initial metadata; fails with a {@link KvgrpcException} when the stream ends without. */
  public CompletableFuture<Metadata> headers() {
    return headers;
  }

  /** The next message; null when the server has ended the stream well. */
  public R next() {
    try {
      return next(Duration.ofDays(36_500));
    } catch (TimeoutException never) {
      throw new IllegalStateException(never);
    }
  }

  /** As {@link #next()}, but waits no longer than that. The stream stands after the timeout. */
  @SuppressWarnings("unchecked")
  public R next(Duration timeout) throws TimeoutException {
    Object taken = end != null ? end : poll(timeout);
    if (taken == null) {
      throw new TimeoutException("no message came within " + timeout);
    }
    if (taken instanceof End ended) {
      end = ended;
      if (ended.status().isOk()) {
        return null;
      }
      throw KvgrpcException.of(ended.status(), ended.trailers(), null);
    }
    call.request(1);
    return (R) taken;
  }

  /** Cancels the stream, unless it is over. */
  @Override
  public synchronized void close() {
    closed = true;
    call.cancel("the reader closed the stream", null);
  }

  private Object poll(Duration timeout) {
    try {
      return arrived.poll(Durations.nanos(timeout), TimeUnit.NANOSECONDS);
    } catch (InterruptedException interrupted) {
      throw Pauses.interrupted(interrupted);
    }
  }

  private final class Arrivals extends ClientCall.Listener<R> {
    @Override
    public void onHeaders(Metadata metadata) {
      headers.complete(metadata);
    }

    @Override
    public void onMessage(R message) {
      arrived.add(message);
    }

    @Override
    public void onClose(Status status, Metadata trailers) {
      if (status.isOk()) {
        headers.complete(new Metadata());
      } else {
        headers.completeExceptionally(KvgrpcException.of(status, trailers, null));
      }
      arrived.add(new End(status, trailers));
    }
  }
}
