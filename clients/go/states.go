package kvgrpc

import (
	"fmt"
	"strings"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// Values that a newer server knows and this version does not are read here as the safe case.

// IsOver says whether a transfer has ended, one way or another. An unknown state is not an end. It says nothing about
// memory.
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

// Succeeded says whether a transfer has ended well: of a RECEIVE, that the KV is in its blocks.
func Succeeded(transfer *pb.Transfer) bool {
	return transfer.GetState() == pb.TransferState_TRANSFER_STATE_SUCCEEDED
}

// MayReuseMemory says whether this engine's blocks of a transfer are the engine's again.
func MayReuseMemory(transfer *pb.Transfer) bool {
	return IsOver(transfer) && Memory(transfer) == pb.MemoryDisposition_MEMORY_DISPOSITION_RETURNED
}

// Memory is the disposition of a transfer's blocks; one that is unknown is QUARANTINED.
func Memory(transfer *pb.Transfer) pb.MemoryDisposition {
	switch memory := transfer.GetMemory(); memory {
	case pb.MemoryDisposition_MEMORY_DISPOSITION_HELD, pb.MemoryDisposition_MEMORY_DISPOSITION_RETURNED:
		return memory
	default:
		return pb.MemoryDisposition_MEMORY_DISPOSITION_QUARANTINED
	}
}

// NextStep is what would help after a failure; UNSPECIFIED, which is no retry, where its reason is unknown.
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

// Outcome is what a cancel found; one that is unknown is CANCELLED_IN_FLIGHT.
func Outcome(reply *pb.CancelTransferResponse) pb.CancelOutcome {
	outcome := reply.GetOutcome()
	if _, known := pb.CancelOutcome_name[int32(outcome)]; !known || outcome == 0 {
		return pb.CancelOutcome_CANCEL_OUTCOME_CANCELLED_IN_FLIGHT
	}
	return outcome
}

// TakesWork says whether an engine takes new work now. An unknown admission is a no.
func TakesWork(admission pb.Admission) bool { return admission == pb.Admission_ADMISSION_OPEN }

// MayRecompute says whether a scheduler is to compute what did not come; else it ends the request.
func MayRecompute(loss pb.OnLoss) bool { return loss == pb.OnLoss_ON_LOSS_RECOMPUTE }

// ReasonName is a reason as errors have it, the same for a transfer's failure and for a call that was refused:
// `LEASE_EXPIRED`, where the schema's value is FAILURE_REASON_LEASE_EXPIRED. A number that is unknown reads as INTERNAL.
func ReasonName(reason pb.FailureReason) string {
	if _, known := pb.FailureReason_name[int32(reason)]; !known {
		reason = pb.FailureReason_FAILURE_REASON_INTERNAL
	}
	return shortName(reason, "FAILURE_REASON_")
}

// MayBeInFlight says whether bytes may still be in flight after a cancel, so that its blocks are not free yet. No other
// outcome is to be told apart: a key that had ended, and one under which nothing had come yet, are over alike.
func MayBeInFlight(reply *pb.CancelTransferResponse) bool {
	return Outcome(reply) == pb.CancelOutcome_CANCEL_OUTCOME_CANCELLED_IN_FLIGHT
}

// lowerName is shortName as errors name phases.
func lowerName(value fmt.Stringer, prefix string) string {
	return strings.ToLower(shortName(value, prefix))
}

// shortName is the name of an enum's value without the prefix that all its names have.
func shortName(value fmt.Stringer, prefix string) string {
	return strings.TrimPrefix(value.String(), prefix)
}
