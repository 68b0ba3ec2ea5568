package dev.kvgrpc.client;

import dev.kvgrpc.v1.ScheduleCall;
import dev.kvgrpc.v1.ScheduleRequest;
import dev.kvgrpc.v1.ScheduleResponse;
import dev.kvgrpc.v1.SchedulerServiceGrpc;
import io.grpc.Context;
import io.grpc.Contexts;
import io.grpc.Deadline;
import io.grpc.Status;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.locks.ReentrantLock;

/**
 * Sends a scheduler's steps over one stream, one at a time, from any thread. When the stream is lost, another one is
 * opened and the step is sent again, which is safe. {@link KvgrpcClient#steps} makes it.
 */
public final class Steps implements AutoCloseable {
  /** Largest number of times that a step is sent: as often as gRPC sends a unary call that meets UNAVAILABLE. */
  private static final int ATTEMPTS = 4;

  private final KvgrpcClient client;
  private final ClientOptions options;
  private final ReentrantLock turn = new ReentrantLock(true);
  private volatile MessageStream<ScheduleRequest, ScheduleResponse> stream;

  /** The client opens the streams, without a trace context: a stream belongs to no request. */
  Steps(KvgrpcClient client, ClientOptions options) {
    this.client = client;
    this.options = options;
  }

  /** Sends a step as {@link #step(ScheduleRequest, Duration)} does, with the deadline of a call. */
  public ScheduleResponse step(ScheduleRequest request) {
    return step(request, options.timeout());
  }

  /**
   * Sends a step and returns its answer. A refused call of the step says so in its answer, and the other calls take
   * effect. The timeout includes the wait for earlier steps and all attempts. The step also ends with the current
   * {@link Context}, and with an interrupt of the thread. Requests that arrive without a trace context get that of the
   * client.
   */
  public ScheduleResponse step(ScheduleRequest request, Duration timeout) {
    ScheduleRequest traced = traced(request);
    Context context = Context.current();
    Deadline deadline = Deadline.after(Durations.nanos(timeout), TimeUnit.NANOSECONDS);
    if (context.getDeadline() != null) {
      deadline = deadline.minimum(context.getDeadline());
    }
    takeTurn(deadline);
    Context.CancellationListener end = cancelled -> close();
    context.addListener(end, Runnable::run);
    try {
      return answer(traced, context, deadline);
    } finally {
      context.removeListener(end);
      turn.unlock();
    }
  }

  /** Ends the stream. A later step opens another one. */
  @Override
  public void close() {
    MessageStream<ScheduleRequest, ScheduleResponse> standing = stream;
    stream = null;
    if (standing != null) {
      standing.close();
    }
  }

  private void takeTurn(Deadline deadline) {
    try {
      if (!turn.tryLock(left(deadline), TimeUnit.NANOSECONDS)) {
        throw late();
      }
    } catch (InterruptedException interrupted) {
      throw Pauses.interrupted(interrupted);
    }
  }

  private ScheduleResponse answer(ScheduleRequest request, Context context, Deadline deadline) {
    Pauses pauses = new Pauses();
    for (int attempt = 1; ; attempt++) {
      try {
        return exchange(request, context, deadline);
      } catch (KvgrpcException error) {
        close(); // a late answer to this step must not be taken for the next one's
        if (context.isCancelled()) {
          throw KvgrpcException.of(Contexts.statusFromCancelled(context));
        }
        long pause = pauses.nextNanos(error.retryDelay());
        boolean over = client.isClosed() || Thread.currentThread().isInterrupted() || left(deadline) <= pause;
        if (over || attempt == ATTEMPTS || !error.isPassing()) {
          throw error;
        }
        sleep(pause);
      }
    }
  }

  private ScheduleResponse exchange(ScheduleRequest request, Context context, Deadline deadline) {
    MessageStream<ScheduleRequest, ScheduleResponse> standing = standing();
    if (context.isCancelled()) {
      throw KvgrpcException.of(Contexts.statusFromCancelled(context));
    }
    standing.send(request);
    try {
      ScheduleResponse reply = standing.next(Duration.ofNanos(left(deadline)));
      if (reply == null) {
        throw KvgrpcException.of(Status.UNAVAILABLE.withDescription("the server ended the stream of steps"));
      }
      return reply;
    } catch (TimeoutException silent) {
      throw late();
    }
  }

  private MessageStream<ScheduleRequest, ScheduleResponse> standing() {
    MessageStream<ScheduleRequest, ScheduleResponse> standing = stream;
    if (standing == null) {
      Context before = Context.ROOT.attach(); // the stream outlives the context of the step that opens it
      try {
        standing = client.open(SchedulerServiceGrpc.getScheduleMethod());
      } finally {
        Context.ROOT.detach(before);
      }
      stream = standing;
    }
    return standing;
  }

  private ScheduleRequest traced(ScheduleRequest request) {
    String traceparent = options.traceparent().get();
    if (traceparent == null || traceparent.isEmpty()) {
      return request;
    }
    ScheduleRequest.Builder made = request.toBuilder();
    for (ScheduleCall.Builder call : made.getCallsBuilderList()) {
      if (call.hasRequestArrived() && call.getRequestArrived().getTraceparent().isEmpty()) {
        call.getRequestArrivedBuilder().setTraceparent(traceparent);
      }
    }
    return made.build();
  }

  private static void sleep(long nanos) {
    try {
      TimeUnit.NANOSECONDS.sleep(nanos);
    } catch (InterruptedException interrupted) {
      throw Pauses.interrupted(interrupted);
    }
  }

  private static long left(Deadline deadline) {
    return Math.max(deadline.timeRemaining(TimeUnit.NANOSECONDS), 0);
  }

  private static KvgrpcException late() {
    return KvgrpcException.of(Status.DEADLINE_EXCEEDED.withDescription("no answer to the step in its time"));
  }
}
