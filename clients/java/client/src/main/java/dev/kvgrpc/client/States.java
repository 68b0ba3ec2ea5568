package dev.kvgrpc.client;

import dev.kvgrpc.v1.Admission;
import dev.kvgrpc.v1.Failure;
import dev.kvgrpc.v1.FailureReason;
import dev.kvgrpc.v1.LeaseState;
import dev.kvgrpc.v1.MemoryDisposition;
import dev.kvgrpc.v1.NextStep;
import dev.kvgrpc.v1.Transfer;
import dev.kvgrpc.v1.TransferPhase;
import dev.kvgrpc.v1.TransferState;
import dev.kvgrpc.v1.WaitCondition;
import dev.kvgrpc.v1.WaitingFor;
import java.util.Locale;

/** The meaning of enum values. Values that only a newer server knows read as the safe case. */
public final class States {
  private States() {}

  /** Returns whether the transfer has ended, whatever the outcome. An unknown state is not an end. */
  public static boolean isOver(Transfer transfer) {
    return switch (transfer.getState()) {
      case TRANSFER_STATE_SUCCEEDED, TRANSFER_STATE_FAILED, TRANSFER_STATE_CANCELLED -> true;
      default -> false;
    };
  }

  /**
   * Returns whether the transfer has succeeded. For a RECEIVE, the KV is in the blocks. For a SEND, the consumers are
   * done.
   */
  public static boolean succeeded(Transfer transfer) {
    return transfer.getState() == TransferState.TRANSFER_STATE_SUCCEEDED;
  }

  /** Returns whether the transfer is over and this engine's blocks are the engine's again. */
  public static boolean mayReuseMemory(Transfer transfer) {
    return isOver(transfer) && transfer.getMemory() == MemoryDisposition.MEMORY_DISPOSITION_RETURNED;
  }

  /** Returns the memory's disposition; QUARANTINED for an unknown one. */
  public static MemoryDisposition memory(Transfer transfer) {
    return switch (transfer.getMemory()) {
      case MEMORY_DISPOSITION_HELD, MEMORY_DISPOSITION_RETURNED -> transfer.getMemory();
      default -> MemoryDisposition.MEMORY_DISPOSITION_QUARANTINED;
    };
  }

  /** Returns whether the transfer has reached the end of a wait for {@code until}. */
  public static boolean meets(Transfer transfer, WaitCondition until) {
    return until == WaitCondition.WAIT_CONDITION_RETURNED ? mayReuseMemory(transfer) : isOver(transfer);
  }

  /** Returns whether the lease pins nothing any more. An unknown state is not an end. */
  public static boolean isOver(LeaseState lease) {
    return switch (lease) {
      case LEASE_STATE_EXPIRED, LEASE_STATE_RELEASED, LEASE_STATE_DONE, LEASE_STATE_VOIDED, LEASE_STATE_LOST,
          LEASE_STATE_RECLAIMED -> true;
      default -> false;
    };
  }

  /** Returns whether the engine takes new work. */
  public static boolean takesWork(Admission admission) {
    return admission == Admission.ADMISSION_OPEN;
  }

  /** Returns the recommended next step; UNSPECIFIED, which is no retry, where the reason or the step is unknown. */
  public static NextStep next(Failure failure) {
    boolean known = switch (failure.getReason()) {
      case FAILURE_REASON_UNSPECIFIED, UNRECOGNIZED -> false;
      default -> failure.getNext() != NextStep.UNRECOGNIZED;
    };
    return known ? failure.getNext() : NextStep.NEXT_STEP_UNSPECIFIED;
  }

  /** Returns what a transfer that is not over waits for, or its phase, in lower case as errors name it. */
  static String phase(Transfer transfer) {
    if (isOver(transfer)) {
      return "return";
    }
    if (transfer.getWaitingFor() != WaitingFor.WAITING_FOR_UNSPECIFIED) {
      return transfer.getWaitingFor().name().replace("WAITING_FOR_", "").toLowerCase(Locale.ROOT);
    }
    int phases = transfer.getPhasesCount();
    return phases == 0 ? "queue" : name(transfer.getPhases(phases - 1).getPhase());
  }

  /** Returns the phase in lower case, as errors name it; empty for none. */
  static String name(TransferPhase phase) {
    boolean none = phase == TransferPhase.TRANSFER_PHASE_UNSPECIFIED;
    return none ? "" : phase.name().replace("TRANSFER_PHASE_", "").toLowerCase(Locale.ROOT);
  }

  /** Returns the reason; INTERNAL for an unknown one. */
  public static FailureReason reason(Failure failure) {
    return switch (failure.getReason()) {
      case FAILURE_REASON_UNSPECIFIED, UNRECOGNIZED -> FailureReason.FAILURE_REASON_INTERNAL;
      default -> failure.getReason();
    };
  }
}
