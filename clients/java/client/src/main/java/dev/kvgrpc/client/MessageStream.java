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
 * A stream that is read by pulling. The server is asked for one more message whenever one was taken, so that a slow
 * reader delays its server and does not fill its own memory. One thread sends, one reads, and any thread may close.
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

  /** Sends a message. On a closed stream it does nothing; the reader gets the reason. */
  public synchronized void send(Q message) {
    if (!closed) {
      call.sendMessage(message);
    }
  }

  /** Ends the client's messages. */
  public synchronized void finish() {
    if (!closed) {
      call.halfClose();
    }
  }

  /**
   * Returns the server's initial metadata. It fails with a {@link KvgrpcException} when the stream ends without
   * metadata.
   */
  public CompletableFuture<Metadata> headers() {
    return headers;
  }

  /** Returns the next message; null when the server has ended the stream without an error. */
  public R next() {
    try {
      return next(Duration.ofDays(36_500));
    } catch (TimeoutException never) {
      throw new IllegalStateException(never);
    }
  }

  /**
   * Returns the next message as {@link #next()} does, after at most this wait. The stream continues after the timeout.
   */
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
