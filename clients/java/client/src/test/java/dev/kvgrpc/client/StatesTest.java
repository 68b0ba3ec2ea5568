package dev.kvgrpc.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.kvgrpc.v1.Admission;
import dev.kvgrpc.v1.Failure;
import dev.kvgrpc.v1.FailureReason;
import dev.kvgrpc.v1.LeaseState;
import dev.kvgrpc.v1.MemoryDisposition;
import dev.kvgrpc.v1.NextStep;
import dev.kvgrpc.v1.Transfer;
import dev.kvgrpc.v1.TransferState;
import org.junit.jupiter.api.Test;

/** Tests that values of a newer server read as the safe case. */
class StatesTest {
  private static Transfer.Builder ended() {
    return Transfer.newBuilder().setState(TransferState.TRANSFER_STATE_FAILED);
  }

  @Test
  void anUnknownStateIsNotAnEnd() {
    assertFalse(States.isOver(Transfer.newBuilder().setStateValue(77).build()));
    assertFalse(States.isOver(Transfer.getDefaultInstance()));
    assertFalse(States.isOver(LeaseState.UNRECOGNIZED));
    assertTrue(States.isOver(ended().build()));
    assertTrue(States.isOver(LeaseState.LEASE_STATE_LOST));
  }

  @Test
  void memoryOfAnUnknownDispositionIsQuarantined() {
    Transfer unknown = ended().setMemoryValue(77).build();
    assertEquals(MemoryDisposition.MEMORY_DISPOSITION_QUARANTINED, States.memory(unknown));
    assertEquals(MemoryDisposition.MEMORY_DISPOSITION_QUARANTINED, States.memory(ended().build()));
    assertFalse(States.mayReuseMemory(unknown));
  }

  @Test
  void memoryIsReusedOnceItsTransferIsOverAndItIsReturned() {
    var returned = ended().setMemory(MemoryDisposition.MEMORY_DISPOSITION_RETURNED);
    assertTrue(States.mayReuseMemory(returned.build()));
    assertFalse(States.mayReuseMemory(returned.setStateValue(77).build()));
  }

  @Test
  void anUnknownReasonOrStepHasNoRetry() {
    Failure.Builder failure = Failure.newBuilder().setNext(NextStep.NEXT_STEP_RETRY_HERE);
    assertEquals(NextStep.NEXT_STEP_UNSPECIFIED, States.next(failure.setReasonValue(777).build()));
    assertEquals(FailureReason.FAILURE_REASON_INTERNAL, States.reason(failure.build()));
    failure.setReason(FailureReason.FAILURE_REASON_QUEUE_TIMEOUT);
    assertEquals(NextStep.NEXT_STEP_RETRY_HERE, States.next(failure.build()));
    assertEquals(NextStep.NEXT_STEP_UNSPECIFIED, States.next(failure.setNextValue(77).build()));
  }

  @Test
  void anUnknownAdmissionTakesNoWork() {
    assertTrue(States.takesWork(Admission.ADMISSION_OPEN));
    assertFalse(States.takesWork(Admission.UNRECOGNIZED));
    assertFalse(States.takesWork(Admission.ADMISSION_UNSPECIFIED));
  }
}
