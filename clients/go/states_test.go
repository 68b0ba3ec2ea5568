package kvgrpc

import (
	"slices"
	"testing"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
	// The schemas between leads and of sessions are not part of this package, but their generated code must compile.
	_ "kvgrpc.dev/kvgrpc/gen/kvgrpc/peer/v1"
	_ "kvgrpc.dev/kvgrpc/gen/kvgrpc/session/v1"
)

const unknown = 99

func TestAnUnknownStateIsNoEnd(t *testing.T) {
	for state, over := range map[pb.TransferState]bool{
		unknown:                                 false,
		pb.TransferState_TRANSFER_STATE_PENDING: false, pb.TransferState_TRANSFER_STATE_ACTIVE: false,
		pb.TransferState_TRANSFER_STATE_SUCCEEDED: true, pb.TransferState_TRANSFER_STATE_FAILED: true,
		pb.TransferState_TRANSFER_STATE_CANCELLED: true,
	} {
		if got := IsOver(&pb.Transfer{State: state}); got != over {
			t.Errorf("%v: %v", state, got)
		}
	}
	if IsOver(nil) || Succeeded(nil) || MayReuseMemory(nil) {
		t.Error("a transfer that is not there is over")
	}
}

func TestUnknownMemoryIsQuarantined(t *testing.T) {
	over := &pb.Transfer{State: pb.TransferState_TRANSFER_STATE_SUCCEEDED, Memory: unknown}
	if Memory(over) != pb.MemoryDisposition_MEMORY_DISPOSITION_QUARANTINED || MayReuseMemory(over) {
		t.Error(Memory(over))
	}
	over.Memory = 0
	if Memory(over) != pb.MemoryDisposition_MEMORY_DISPOSITION_QUARANTINED {
		t.Error(Memory(over))
	}
	over.Memory = pb.MemoryDisposition_MEMORY_DISPOSITION_RETURNED
	if !MayReuseMemory(over) {
		t.Error("returned memory may not be reused")
	}
	over.State = unknown
	if MayReuseMemory(over) {
		t.Error("the memory of a transfer in an unknown state may be reused")
	}
}

func TestAFailureOfAnUnknownReasonOrStepHasNoRetry(t *testing.T) {
	here, known := pb.NextStep_NEXT_STEP_RETRY_HERE, pb.FailureReason_FAILURE_REASON_QUEUE_TIMEOUT
	if got := NextStep(&pb.Failure{Reason: known, Next: here}); got != here {
		t.Error(got)
	}
	for _, failure := range []*pb.Failure{nil, {Reason: unknown, Next: here}, {Reason: known, Next: unknown}} {
		if got := NextStep(failure); got != pb.NextStep_NEXT_STEP_UNSPECIFIED {
			t.Errorf("%v: %v", failure, got)
		}
	}
}

func TestUnknownValuesReadAsTheSafeCase(t *testing.T) {
	if got := Outcome(&pb.CancelTransferResponse{Outcome: unknown}); got != pb.CancelOutcome_CANCEL_OUTCOME_CANCELLED_IN_FLIGHT {
		t.Error(got)
	}
	if TakesWork(unknown) || !TakesWork(pb.Admission_ADMISSION_OPEN) {
		t.Error("admission")
	}
	if MayRecompute(unknown) || !MayRecompute(pb.OnLoss_ON_LOSS_RECOMPUTE) {
		t.Error("loss")
	}
}

func TestRunsAreMaximalAndGiveTheirIdsBack(t *testing.T) {
	ids := []uint32{4, 5, 6, 2, 9, 10}
	runs := BlockRuns(ids)
	if !slices.Equal(runs.Starts, []uint32{4, 2, 9}) || !slices.Equal(runs.Counts, []uint32{3, 1, 2}) {
		t.Error(runs)
	}
	if !slices.Equal(BlockIDs(runs), ids) {
		t.Error(BlockIDs(runs))
	}
	if got := BlockCount(&pb.Blocks{Groups: []*pb.GroupBlocks{{Runs: runs}, {Group: 1, Runs: runs}}}); got != 12 {
		t.Error(got)
	}
}
