package dev.kvgrpc.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.ByteString;
import com.google.protobuf.Message;
import dev.kvgrpc.v1.CancelTransferRequest;
import dev.kvgrpc.v1.Failure;
import dev.kvgrpc.v1.FailureReason;
import dev.kvgrpc.v1.Grant;
import dev.kvgrpc.v1.HandshakeRequest;
import dev.kvgrpc.v1.LeaseState;
import dev.kvgrpc.v1.NextStep;
import dev.kvgrpc.v1.PullBlocksRequest;
import dev.kvgrpc.v1.Transfer;
import dev.kvgrpc.v1.TransferPhase;
import dev.kvgrpc.v1.TransferState;
import io.grpc.Status;
import java.util.List;
import org.junit.jupiter.api.Test;

/** Tests the exceptions of transfers, and the printed form of messages. */
class MovesTest {
  private static final ByteString SECRET = ByteString.copyFromUtf8("open sesame");

  @Test
  void aTransferThatEndedWithoutItsKvIsAnErrorWithWhatItsFailureSays() {
    Failure failure = Failure.newBuilder()
        .setReason(FailureReason.FAILURE_REASON_LEASE_EXPIRED)
        .setNext(NextStep.NEXT_STEP_RECOMPUTE)
        .setPhase(TransferPhase.TRANSFER_PHASE_SETTLE)
        .setMessage("too late")
        .build();
    Transfer failed = Transfer.newBuilder()
        .setTransferId("t-1")
        .setState(TransferState.TRANSFER_STATE_FAILED)
        .setFailure(failure)
        .build();
    KvgrpcException error = assertThrows(KvgrpcException.class, () -> Moves.check(failed));
    assertEquals(Status.Code.ABORTED, error.code());
    assertEquals("LEASE_EXPIRED", error.reason());
    assertEquals(NextStep.NEXT_STEP_RECOMPUTE, error.next());
    assertEquals("too late", error.description());
    assertEquals("settle", error.metadata().get("phase"));
    assertEquals("t-1", error.metadata().get("transfer_id"));
  }

  @Test
  void aTransferThatSucceededOrIsNotOverIsNoError() {
    for (TransferState state :
        List.of(TransferState.TRANSFER_STATE_ACTIVE, TransferState.TRANSFER_STATE_SUCCEEDED)) {
      Transfer transfer = Transfer.newBuilder().setState(state).build();
      assertSame(transfer, Moves.check(transfer));
    }
    Transfer cancelled = Transfer.newBuilder().setState(TransferState.TRANSFER_STATE_CANCELLED).build();
    assertEquals("CANCELLED", assertThrows(KvgrpcException.class, () -> Moves.check(cancelled)).reason());
  }

  @Test
  void whatIsPrintedRedactedHasNoSecretAtAnyDepth() {
    Grant grant = Grant.newBuilder().setToken(SECRET).setEngineId("P").build();
    List<Message> messages = List.of(
        grant,
        PullBlocksRequest.newBuilder().setGrant(grant).setTransferKey(SECRET).build(),
        CancelTransferRequest.newBuilder().setTransferKey(SECRET).setMessage("P").build(),
        HandshakeRequest.newBuilder().addProofs(SECRET).addProofs(SECRET).setExpectedEngineId("P").build());
    for (Message message : messages) {
      String text = Redacted.text(message);
      assertTrue(text.contains("[REDACTED]"), text);
      assertTrue(text.contains("\"P\""), text);
      assertFalse(text.contains("sesame"), text);
    }
    assertEquals(SECRET, grant.getToken());
  }

  @Test
  void aLeaseThatWasTakenBackIsOver() {
    assertTrue(States.isOver(LeaseState.LEASE_STATE_RECLAIMED));
  }
}
