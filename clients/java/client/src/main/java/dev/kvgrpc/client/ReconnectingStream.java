package dev.kvgrpc.client;

import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * A server stream that its reading thread opens again when it breaks. There is a growing pause between streams. Their
 * number has no limit, because a reader can stop at any time.
 */
abstract class ReconnectingStream<Q, R> implements AutoCloseable {
  private final KvgrpcClient client;
  private final MethodDescriptor<Q, R> method;
  private final Pauses pauses = new Pauses();
  private final CountDownLatch closed = new CountDownLatch(1);
  private volatile MessageStream<Q, R> stream;
  private boolean first;
  private long openedAt;
  private long heardAt;
  private long reopenAt = System.nanoTime();
  private KvgrpcException failure;

  /** The result of one step: a message, or the error that broke the stream. */
  record Step<R>(R message, boolean first, KvgrpcException broken) {}

  ReconnectingStream(KvgrpcClient client, MethodDescriptor<Q, R> method) {
    this.client = client;
    this.method = method;
  }

  /** Returns the request for the next stream, after everything that was read. */
  abstract Q request();

  /** Returns whether another stream may succeed after one that ended with this error. */
  abstract boolean isPassing(KvgrpcException error);

  /** Returns how long a server may be silent before the stream counts as broken. */
  abstract Duration silence();

  /** Ends the watch, even while a thread reads it. */
  @Override
  public void close() {
    closed.countDown();
    MessageStream<Q, R> standing = stream;
    if (standing != null) {
      standing.close();
    }
  }

  /** Returns the next message or break; null when the time {@code until} is reached. */
  final Step<R> step(long until) {
    if (failure != null) {
      throw failure;
    }
    if (stream == null && !open(until)) {
      return null;
    }
    long quietUntil = heardAt + Durations.nanos(silence());
    long left = Math.max(Math.min(until - System.nanoTime(), quietUntil - System.nanoTime()), 0);
    try {
      R message = stream.next(Duration.ofNanos(left));
      if (message == null) {
        return broken(KvgrpcException.of(Status.UNAVAILABLE.withDescription("the server ended the stream")));
      }
      Step<R> step = new Step<>(message, first, null);
      first = false;
      heardAt = System.nanoTime();
      return step;
    } catch (TimeoutException none) {
      if (System.nanoTime() - quietUntil < 0) {
        return null;
      }
      return broken(KvgrpcException.of(Status.UNAVAILABLE.withDescription("the server is silent")));
    } catch (KvgrpcException error) {
      if (Thread.currentThread().isInterrupted()) {
        throw error;
      }
      return broken(error);
    }
  }

  private boolean open(long until) {
    long now = System.nanoTime();
    pause(Math.min(reopenAt - now, until - now));
    if (System.nanoTime() - reopenAt < 0) {
      return false;
    }
    MessageStream<Q, R> opened = client.open(method);
    stream = opened;
    first = true;
    openedAt = heardAt = System.nanoTime();
    if (closed.getCount() == 0) {
      opened.close();
    }
    opened.send(request());
    opened.finish();
    return true;
  }

  private void pause(long nanos) {
    try {
      if (closed.await(Math.max(nanos, 0), TimeUnit.NANOSECONDS)) {
        throw KvgrpcException.of(Status.CANCELLED.withDescription("the watch is closed"));
      }
    } catch (InterruptedException interrupted) {
      throw Pauses.interrupted(interrupted);
    }
  }

  private Step<R> broken(KvgrpcException error) {
    stream.close();
    stream = null;
    long now = System.nanoTime();
    if (now - openedAt >= Pauses.LONGEST_NANOS) {
      pauses.reset();
    }
    reopenAt = now + pauses.nextNanos(error.retryDelay());
    if (closed.getCount() == 0 || client.isClosed() || !isPassing(error)) {
      throw fail(error);
    }
    return new Step<>(null, false, error);
  }

  /** Ends the watch with this error, now and at every later step. */
  final KvgrpcException fail(KvgrpcException error) {
    failure = error;
    close();
    return error;
  }

  /** Returns the end of a timeout that begins now, for {@code until}. */
  static long after(Duration timeout) {
    return System.nanoTime() + Durations.nanos(timeout);
  }
}
