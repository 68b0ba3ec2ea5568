package kvgrpc

import (
	"fmt"
	"strings"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// The functions below read a value that this version does not know as the safe case.

// IsOver reports whether a transfer has ended, whatever the outcome. An unknown state is not an end. IsOver says
// nothing about memory.
func IsOver(transfer *pb.Transfer) bool {
	switch transfer.GetState() {
	case pb.TransferState_TRANSFER_STATE_SUCCEEDED,
		pb.TransferState_TRANSFER_STATE_FAILED,
		pb.TransferState_TRANSFER_STATE_CANCELLED:
		return true
	default:
		return false
	}
}

// Succeeded reports whether a transfer has succeeded. For a RECEIVE it means that the KV is in its blocks.
func Succeeded(transfer *pb.Transfer) bool {
	return transfer.GetState() == pb.TransferState_TRANSFER_STATE_SUCCEEDED
}

// MayReuseMemory reports whether the engine may reuse its blocks of a transfer.
func MayReuseMemory(transfer *pb.Transfer) bool {
	return IsOver(transfer) && Memory(transfer) == pb.MemoryDisposition_MEMORY_DISPOSITION_RETURNED
}

// Memory returns the disposition of a transfer's blocks. An unknown disposition is QUARANTINED.
func Memory(transfer *pb.Transfer) pb.MemoryDisposition {
	switch memory := transfer.GetMemory(); memory {
	case pb.MemoryDisposition_MEMORY_DISPOSITION_HELD, pb.MemoryDisposition_MEMORY_DISPOSITION_RETURNED:
		return memory
	default:
		return pb.MemoryDisposition_MEMORY_DISPOSITION_QUARANTINED
	}
}

// NextStep returns the recommended step after a failure. It is UNSPECIFIED, which is no retry, for an unknown reason.
func NextStep(failure *pb.Failure) pb.NextStep {
	return nextStep(failure.GetReason(), failure.GetNext())
}

func nextStep(reason pb.FailureReason, next pb.NextStep) pb.NextStep {
	_, reasonKnown := pb.FailureReason_name[int32(reason)]
	_, nextKnown := pb.NextStep_name[int32(next)]
	if !reasonKnown || !nextKnown || reason == pb.FailureReason_FAILURE_REASON_UNSPECIFIED {
		return pb.NextStep_NEXT_STEP_UNSPECIFIED
	}
	return next
}

// Outcome returns the outcome of a cancel. An unknown outcome is CANCELLED_IN_FLIGHT.
func Outcome(reply *pb.CancelTransferResponse) pb.CancelOutcome {
	outcome := reply.GetOutcome()
	if _, known := pb.CancelOutcome_name[int32(outcome)]; !known || outcome == 0 {
		return pb.CancelOutcome_CANCEL_OUTCOME_CANCELLED_IN_FLIGHT
	}
	return outcome
}

// TakesWork reports whether an engine takes new work now. It is false for an unknown admission.
func TakesWork(admission pb.Admission) bool { return admission == pb.Admission_ADMISSION_OPEN }

// MayRecompute reports whether a scheduler must compute what did not arrive. Otherwise it ends the request.
func MayRecompute(loss pb.OnLoss) bool { return loss == pb.OnLoss_ON_LOSS_RECOMPUTE }

// ReasonName returns a reason as errors name it: `LEASE_EXPIRED` for FAILURE_REASON_LEASE_EXPIRED. The failure of a
// transfer and the error of a refused call have the same names. An unknown number reads as INTERNAL.
func ReasonName(reason pb.FailureReason) string {
	if _, known := pb.FailureReason_name[int32(reason)]; !known {
		reason = pb.FailureReason_FAILURE_REASON_INTERNAL
	}
	return shortName(reason, "FAILURE_REASON_")
}

// MayBeInFlight reports whether bytes may still be in flight after a cancel, so that its blocks are not free yet. All
// other outcomes are equivalent: a key whose transfers had ended, and a key that had no transfer yet, are both over.
func MayBeInFlight(reply *pb.CancelTransferResponse) bool {
	return Outcome(reply) == pb.CancelOutcome_CANCEL_OUTCOME_CANCELLED_IN_FLIGHT
}

// lowerName returns the short name in lower case, as errors name phases.
func lowerName(value fmt.Stringer, prefix string) string {
	return strings.ToLower(shortName(value, prefix))
}

// shortName returns the name of an enum's value without the prefix that all its names have.
func shortName(value fmt.Stringer, prefix string) string {
	return strings.TrimPrefix(value.String(), prefix)
}
