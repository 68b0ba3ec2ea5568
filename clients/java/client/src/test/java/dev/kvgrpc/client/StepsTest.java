package dev.kvgrpc.client;

import static dev.kvgrpc.client.FakeServer.TRACEPARENT;
import static dev.kvgrpc.client.FakeServer.refusal;
import static dev.kvgrpc.client.FakeServer.take;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.kvgrpc.v1.RequestArrivedRequest;
import dev.kvgrpc.v1.ScheduleCall;
import dev.kvgrpc.v1.ScheduleRequest;
import dev.kvgrpc.v1.ScheduleResponse;
import dev.kvgrpc.v1.SchedulerNews;
import dev.kvgrpc.v1.SchedulerServiceGrpc.SchedulerServiceImplBase;
import io.grpc.Context;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.BiConsumer;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** Tests that steps share a stream, and have the deadlines, errors and ends of calls. */
class StepsTest {
  private final BlockingQueue<ScheduleRequest> seen = new LinkedBlockingQueue<>();
  private final AtomicInteger streams = new AtomicInteger();
  private volatile BiConsumer<ScheduleRequest, StreamObserver<ScheduleResponse>> answer = this::reply;
  private final FakeServer server = new FakeServer(new Scheduler());
  private final KvgrpcClient client = server.client();
  private final Steps steps = client.steps();

  @AfterEach
  void close() {
    client.close();
    server.close();
  }

  @Test
  void stepsGoOverOneStream() {
    for (int seq = 1; seq < 4; seq++) {
      assertEquals(1, streamOf(steps.step(step(seq))));
      assertEquals(seq, take(seen).getAfterSeq());
    }
  }

  @Test
  void aStepWhoseStreamIsLostIsSentAgainOverAnother() {
    answer = (step, caller) -> {
      if (streams.get() < 3) {
        caller.onCompleted();
      } else {
        reply(step, caller);
      }
    };
    assertEquals(3, streamOf(steps.step(step(7))));
    server.stop();
    server.start();
    assertTrue(streamOf(steps.step(step(8))) > 3);
  }

  @Test
  void aRefusedStepIsRepeatedOnlyWhereThatMayHelp() {
    answer = (step, caller) -> caller.onError(refusal(Status.Code.ABORTED, "INCARNATION_CHANGED", "RECOMPUTE"));
    assertEquals("INCARNATION_CHANGED", assertThrows(KvgrpcException.class, () -> steps.step(step(0))).reason());
    assertEquals(1, streams.get());
    answer = (step, caller) -> caller.onError(refusal(Status.Code.UNAVAILABLE, "NO_POOL", "RETRY_HERE"));
    assertEquals("NO_POOL", assertThrows(KvgrpcException.class, () -> steps.step(step(0))).reason());
    assertEquals(5, streams.get());
  }

  @Test
  void aStepThatIsLateOrGivenUpLeavesNoAnswerToTheNext() throws Exception {
    answer = (step, caller) -> {
      if (step.getAfterSeq() == 0) {
        reply(step, caller);
      }
    };
    KvgrpcException late =
        assertThrows(KvgrpcException.class, () -> steps.step(step(1), Duration.ofMillis(50)));
    assertEquals(Status.Code.DEADLINE_EXCEEDED, late.code());
    assertEquals(2, streamOf(steps.step(step(0))));

    Context.CancellableContext context = Context.current().withCancellation();
    CompletableFuture<Throwable> given = new CompletableFuture<>();
    new Thread(() -> context.run(() -> given.complete(failureOf(2)))).start();
    while (take(seen).getAfterSeq() != 2) {}
    context.cancel(null);
    assertEquals(Status.Code.CANCELLED, ((KvgrpcException) given.get()).code());
    assertEquals(3, streamOf(steps.step(step(0))));

    CompletableFuture<Throwable> interrupted = new CompletableFuture<>();
    Thread thread = new Thread(() -> interrupted.complete(failureOf(3)));
    thread.start();
    while (take(seen).getAfterSeq() != 3) {}
    thread.interrupt();
    assertEquals(Status.Code.CANCELLED, ((KvgrpcException) interrupted.get()).code());
    assertEquals(4, streamOf(steps.step(step(0))));
  }

  @Test
  void aStreamOutlivesTheContextOfTheStepThatOpenedIt() throws Exception {
    try (Context.CancellableContext context = Context.current().withCancellation()) {
      assertEquals(1, streamOf(context.call(() -> steps.step(step(0)))));
    }
    assertEquals(1, streamOf(steps.step(step(0))));
  }

  @Test
  void theTraceOfAStepIsThatOfTheRequestsThatArriveInIt() {
    RequestArrivedRequest own = RequestArrivedRequest.newBuilder().setTraceparent("own").build();
    ScheduleRequest two = ScheduleRequest.newBuilder()
        .addCalls(ScheduleCall.newBuilder().setRequestArrived(RequestArrivedRequest.getDefaultInstance()))
        .addCalls(ScheduleCall.newBuilder().setRequestArrived(own))
        .build();
    client.withTraceparent("00-a-b-01").steps().step(two);
    ScheduleRequest told = take(seen);
    assertEquals("00-a-b-01", told.getCalls(0).getRequestArrived().getTraceparent());
    assertEquals("own", told.getCalls(1).getRequestArrived().getTraceparent());
    assertFalse(server.arrival().headers().containsKey(TRACEPARENT));
    steps.step(two);
    assertEquals("", take(seen).getCalls(0).getRequestArrived().getTraceparent());
  }

  private Throwable failureOf(long seq) {
    return assertThrows(KvgrpcException.class, () -> steps.step(step(seq)));
  }

  private static ScheduleRequest step(long seq) {
    return ScheduleRequest.newBuilder().setAfterSeq(seq).build();
  }

  private static long streamOf(ScheduleResponse reply) {
    return reply.getNews(0).getSeq();
  }

  private void reply(ScheduleRequest step, StreamObserver<ScheduleResponse> caller) {
    SchedulerNews news = SchedulerNews.newBuilder().setSeq(streams.get()).build();
    caller.onNext(ScheduleResponse.newBuilder().addNews(news).build());
  }

  private final class Scheduler extends SchedulerServiceImplBase {
    @Override
    public StreamObserver<ScheduleRequest> schedule(StreamObserver<ScheduleResponse> caller) {
      streams.incrementAndGet();
      return new StreamObserver<>() {
        @Override
        public void onNext(ScheduleRequest step) {
          seen.add(step);
          answer.accept(step, caller);
        }

        @Override
        public void onError(Throwable cut) {}

        @Override
        public void onCompleted() {
          caller.onCompleted();
        }
      };
    }
  }
}
