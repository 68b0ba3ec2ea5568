package dev.kvgrpc.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.rpc.RetryInfo;
import dev.kvgrpc.v1.TransferServiceGrpc.TransferServiceImplBase;
import dev.kvgrpc.v1.WaitCondition;
import dev.kvgrpc.v1.WaitTransferRequest;
import dev.kvgrpc.v1.WaitTransferResponse;
import io.grpc.Context;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** Tests waits for one transfer, by as many calls as that takes. */
class WaitingTest {
  private static final WaitCondition RETURNED = WaitCondition.WAIT_CONDITION_RETURNED;

  private static final Object SILENCE = new Object();
  /** Returns a refusal that asks for a longer pause than a test lasts. */
  private static final StatusRuntimeException AWAY = FakeServer.refusal(
      Status.Code.RESOURCE_EXHAUSTED,
      "QUEUE_FULL",
      "RETRY_HERE",
      RetryInfo.newBuilder().setRetryDelay(Durations.toProto(Duration.ofMinutes(5))).build());

  private final Deque<Object> answers = new ArrayDeque<>();
  private final BlockingQueue<WaitTransferRequest> requests = new LinkedBlockingQueue<>();
  private final FakeServer server = new FakeServer(new Transfers());
  private final KvgrpcClient client = server.client();

  @AfterEach
  void close() {
    client.close();
    server.close();
  }

  @Test
  void aWaitMayBeLongerThanOneCall() {
    answers.add(met(false));
    answers.add(met(false));
    answers.add(met(true));
    WaitTransferResponse reply = client.await("t", RETURNED, Duration.ofMinutes(10));
    assertTrue(reply.getConditionMet());
    assertEquals(3, requests.size());
    for (WaitTransferRequest request : requests) {
      assertEquals("t", request.getTransferId());
      assertEquals(RETURNED, request.getUntil());
      assertTrue(request.getTimeout().getSeconds() <= 60);
    }
  }

  @Test
  void aWaitEndsWithTheTransferAsItIsWhenItsTimeIsOver() {
    WaitTransferResponse reply = client.await("t", RETURNED, Duration.ofMillis(20));
    assertFalse(reply.getConditionMet());
    assertTrue(requests.stream().allMatch(WaitTransferRequest::hasTimeout), "unset would be the server's longest");
  }

  @Test
  void aServerThatIsAwayIsWaitedForWhileTimeIsLeft() {
    // The server fails more often than gRPC retries one call.
    for (int i = 0; i < 6; i++) {
      answers.add(Status.UNAVAILABLE.asRuntimeException());
    }
    answers.add(met(true));
    assertTrue(client.await("t", RETURNED, Duration.ofMinutes(10)).getConditionMet());
  }

  @Test
  void aServerThatAnswersBeforeItsTimeIsNotAskedAtFullSpeed() {
    assertFalse(client.await("t", RETURNED, Duration.ofMillis(400)).getConditionMet());
    // The pauses are at least 50 ms, and short waits may reach the end of the time.
    assertTrue(requests.size() < 20, () -> requests.size() + " calls");
  }

  @Test
  void whatPassesAndCallsThatNoServerAnsweredAreNoEnd() {
    answers.add(FakeServer.refusal(Status.Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "RETRY_HERE"));
    answers.add(FakeServer.refusal(Status.Code.DEADLINE_EXCEEDED, "DEADLINE", "RETRY_HERE"));
    answers.add(Status.CANCELLED.asRuntimeException());
    answers.add(Status.INTERNAL.asRuntimeException());
    answers.add(Status.UNKNOWN.asRuntimeException());
    answers.add(met(true));
    assertTrue(client.await("t", RETURNED, Duration.ofMinutes(10)).getConditionMet());
    assertEquals(6, requests.size());
  }

  @Test
  void anErrorWithAReasonThatDoesNotPassEndsTheWait() {
    for (Status.Code code : List.of(Status.Code.CANCELLED, Status.Code.INTERNAL, Status.Code.UNKNOWN)) {
      answers.add(FakeServer.refusal(code, "INTERNAL", "RECOMPUTE"));
      var error = assertThrows(KvgrpcException.class, () -> client.await("t", RETURNED, Duration.ofMinutes(10)));
      assertEquals(code, error.code());
    }
    assertEquals(3, requests.size());
  }

  @Test
  void aWaitEndsWithTheCallOfItsCaller() throws Exception {
    var callers = Context.current().withCancellation();
    answers.add(SILENCE);
    assertEquals(Status.Code.CANCELLED, endedBy(callers, () -> callers.cancel(null)).code());
    var other = Context.current().withCancellation();
    answers.add(AWAY);
    assertEquals(Status.Code.CANCELLED, endedBy(other, () -> other.cancel(null)).code());
    assertTrue(requests.isEmpty(), "it was asked again");
  }

  @Test
  void aWaitEndsWithItsClient() throws Exception {
    answers.add(SILENCE);
    assertEquals(Status.Code.UNAVAILABLE, endedBy(Context.current(), client::close).code());
    try (KvgrpcClient other = server.client()) {
      answers.add(AWAY);
      assertEquals(Status.Code.UNAVAILABLE, endedBy(other, Context.current(), other::close).code());
    }
  }

  private KvgrpcException endedBy(Context context, Runnable end) throws Exception {
    return endedBy(client, context, end);
  }

  /** Returns the error of a wait that has begun when something ends it. */
  private KvgrpcException endedBy(KvgrpcClient waiting, Context context, Runnable end) throws Exception {
    var failed = new CompletableFuture<KvgrpcException>();
    Thread waiter = new Thread(context.wrap(() -> {
      try {
        waiting.await("t", RETURNED, Duration.ofMinutes(10));
      } catch (KvgrpcException error) {
        failed.complete(error);
      }
    }));
    waiter.setDaemon(true);
    waiter.start();
    FakeServer.take(requests);
    Thread.sleep(50);
    end.run();
    return failed.get(20, TimeUnit.SECONDS);
  }

  @Test
  void aServerThatStaysAwayIsAnErrorWhenTheTimeIsOver() {
    server.stop();
    var error = assertThrows(KvgrpcException.class, () -> client.await("t", RETURNED, Duration.ofMillis(200)));
    assertEquals(Status.Code.UNAVAILABLE, error.code());
  }

  @Test
  void aRefusalEndsTheWait() {
    answers.add(FakeServer.refusal(Status.Code.NOT_FOUND, "TRANSFER_NOT_FOUND", "RECOMPUTE"));
    var error = assertThrows(KvgrpcException.class, () -> client.await("t", RETURNED, Duration.ofMinutes(10)));
    assertEquals("TRANSFER_NOT_FOUND", error.reason());
    assertEquals(1, requests.size());
  }

  private static WaitTransferResponse met(boolean met) {
    return WaitTransferResponse.newBuilder().setConditionMet(met).build();
  }

  private final class Transfers extends TransferServiceImplBase {
    @Override
    public void waitTransfer(WaitTransferRequest request, StreamObserver<WaitTransferResponse> caller) {
      requests.add(request);
      Object answer = answers.isEmpty() ? met(false) : answers.poll();
      if (answer == SILENCE) {
        return;
      }
      if (answer instanceof StatusRuntimeException refusal) {
        caller.onError(refusal);
        return;
      }
      caller.onNext((WaitTransferResponse) answer);
      caller.onCompleted();
    }
  }
}
