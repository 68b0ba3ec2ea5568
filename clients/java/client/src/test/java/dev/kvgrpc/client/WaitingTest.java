package dev.kvgrpc.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.kvgrpc.v1.TransferServiceGrpc.TransferServiceImplBase;
import dev.kvgrpc.v1.WaitCondition;
import dev.kvgrpc.v1.WaitTransferRequest;
import dev.kvgrpc.v1.WaitTransferResponse;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** Waiting for one transfer by as many calls as it takes. */
class WaitingTest {
  private static final WaitCondition RETURNED = WaitCondition.WAIT_CONDITION_RETURNED;

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
    // More than gRPC itself repeats one call.
    for (int i = 0; i < 6; i++) {
      answers.add(Status.UNAVAILABLE.asRuntimeException());
    }
    answers.add(met(true));
    assertTrue(client.await("t", RETURNED, Duration.ofMinutes(10)).getConditionMet());
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
      if (answer instanceof StatusRuntimeException refusal) {
        caller.onError(refusal);
        return;
      }
      caller.onNext((WaitTransferResponse) answer);
      caller.onCompleted();
    }
  }
}
