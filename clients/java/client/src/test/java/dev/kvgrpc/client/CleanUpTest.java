package dev.kvgrpc.client;

import static dev.kvgrpc.client.FakeServer.take;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.ByteString;
import dev.kvgrpc.client.CleanUp.Side;
import dev.kvgrpc.v1.Blocks;
import dev.kvgrpc.v1.CancelOutcome;
import dev.kvgrpc.v1.CancelTransferRequest;
import dev.kvgrpc.v1.CancelTransferResponse;
import dev.kvgrpc.v1.Content;
import dev.kvgrpc.v1.FinishedBlocksRequest;
import dev.kvgrpc.v1.FinishedBlocksResponse;
import dev.kvgrpc.v1.HandoffServiceGrpc;
import dev.kvgrpc.v1.TransferServiceGrpc.TransferServiceImplBase;
import io.grpc.Context;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** Tests that a clean-up tells every side, and returns the result of each. */
class CleanUpTest {
  private static final ByteString KEY = ByteString.copyFromUtf8("0123456789abcdef");

  private final Transfers source = new Transfers();
  private final Transfers destination = new Transfers();
  private final FakeServer sourceServer = new FakeServer(source);
  private final FakeServer destinationServer = new FakeServer(destination);
  private final KvgrpcClient p = sourceServer.client();
  private final KvgrpcClient d = destinationServer.client();

  @AfterEach
  void close() {
    p.close();
    d.close();
    sourceServer.close();
    destinationServer.close();
  }

  @Test
  void everySideIsToldWhatToCancelAndFree() {
    var outcomes = CleanUp.run(List.of(Side.ofKey(p, KEY, "a1"), Side.ofId(d, "t1", "a2", "a3")), "hung up");
    CancelTransferRequest atSource = take(source.requests);
    CancelTransferRequest atDestination = take(destination.requests);
    assertEquals(KEY, atSource.getTransferKey());
    assertEquals(List.of("a1"), atSource.getFreeAllocationIdsList());
    assertEquals("t1", atDestination.getTransferId());
    assertEquals(List.of("a2", "a3"), atDestination.getFreeAllocationIdsList());
    assertEquals("hung up", atDestination.getMessage());
    assertFalse(atSource.getIdempotencyKey().isEmpty());
    assertNotEquals(atSource.getIdempotencyKey(), atDestination.getIdempotencyKey());
    for (var outcome : outcomes) {
      assertEquals(CancelOutcome.CANCEL_OUTCOME_CANCELLED_IN_FLIGHT, outcome.reply().orElseThrow().getOutcome());
    }
  }

  @Test
  void aSideThatFailsKeepsNoOtherFromBeingTold() {
    source.refused = true;
    var outcomes = CleanUp.run(List.of(Side.ofKey(p, KEY, "gone"), Side.ofKey(d, KEY)), "");
    assertEquals("POOL_KIND_MISMATCH", outcomes.get(0).error().orElseThrow().reason());
    assertTrue(outcomes.get(1).reply().isPresent());
  }

  @Test
  void aSideThatIsAwayKeepsNoOtherFromBeingTold() {
    sourceServer.stop();
    var outcomes = CleanUp.run(List.of(Side.ofKey(p, KEY), Side.ofKey(d, KEY)), "");
    assertEquals(Status.Code.UNAVAILABLE, outcomes.get(0).error().orElseThrow().code());
    assertTrue(outcomes.get(1).reply().isPresent());
  }

  @Test
  void aCallerWhoseOwnCallIsOverTellsEverySide() {
    var over = Context.current().withCancellation();
    over.cancel(null);
    over.run(() -> {
      for (var outcome : CleanUp.run(List.of(Side.ofKey(p, KEY), Side.ofKey(d, KEY)), "hung up")) {
        assertTrue(outcome.reply().isPresent(), outcome::toString);
      }
    });
  }

  @Test
  void aThreadThatIsInterruptedTellsEverySideAndStaysInterrupted() {
    Thread.currentThread().interrupt();
    var outcomes = CleanUp.run(List.of(Side.ofKey(p, KEY), Side.ofKey(d, KEY)), "hung up");
    assertTrue(Thread.interrupted());
    outcomes.forEach(outcome -> assertTrue(outcome.reply().isPresent(), outcome::toString));
  }

  @Test
  void aMoveTellsWhyItFailedAlsoWhereItsCleanUpFails() {
    var handoff = new HandoffServiceGrpc.HandoffServiceImplBase() {
      @Override
      public void finishedBlocks(FinishedBlocksRequest request, StreamObserver<FinishedBlocksResponse> caller) {
        caller.onError(FakeServer.refusal(Status.Code.ABORTED, "INCARNATION_CHANGED", "RECOMPUTE"));
      }
    };
    AtomicInteger asked = new AtomicInteger();
    ClientOptions traced = ClientOptions.defaults().withTraceparent(() -> {
      if (asked.incrementAndGet() > 1) {
        throw new IllegalStateException("no span");
      }
      return "";
    });
    Moves.Options into = new Moves.Options("r", Optional.of(Blocks.getDefaultInstance()), Duration.ofSeconds(9));
    try (FakeServer server = new FakeServer(handoff);
        KvgrpcClient from = KvgrpcClient.connect(server.address(), traced)) {
      var error = assertThrows(
          KvgrpcException.class,
          () -> Moves.move(from, d, Blocks.getDefaultInstance(), Content.getDefaultInstance(), into));
      assertEquals("INCARNATION_CHANGED", error.reason());
    }
    assertEquals("the move failed", take(destination.requests).getMessage());
  }

  @Test
  void nothingThatIsPrintedHasASecret() {
    ClientOptions options = ClientOptions.defaults().withMetadata(Map.of("authorization", "Bearer open-sesame"));
    assertEquals("ClientOptions[timeout=PT10S, metadata=[authorization]]", options.toString());
    assertEquals("Side[transferKey=[REDACTED], freeAllocationIds=[a1]]", Side.ofKey(p, KEY, "a1").toString());
    assertEquals("Side[transferId=t1, freeAllocationIds=[]]", Side.ofId(p, "t1").toString());
  }

  private static final class Transfers extends TransferServiceImplBase {
    final BlockingQueue<CancelTransferRequest> requests = new LinkedBlockingQueue<>();
    volatile boolean refused;

    @Override
    public void cancelTransfer(CancelTransferRequest request, StreamObserver<CancelTransferResponse> caller) {
      requests.add(request);
      if (refused) {
        caller.onError(FakeServer.refusal(Status.Code.FAILED_PRECONDITION, "POOL_KIND_MISMATCH", "FIX_REQUEST"));
        return;
      }
      caller.onNext(CancelTransferResponse.newBuilder()
          .setOutcome(CancelOutcome.CANCEL_OUTCOME_CANCELLED_IN_FLIGHT)
          .build());
      caller.onCompleted();
    }
  }
}
