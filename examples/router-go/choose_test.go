package main

import (
	"testing"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func statusOf(free, queue uint32) *pb.EngineStatus {
	return &pb.EngineStatus{
		Admission: pb.Admission_ADMISSION_OPEN, WaitingTurnCount: queue,
		Groups: []*pb.GroupLoad{{BlockCount: 800, FreeBlockCount: free}},
	}
}

func TestTheEngineWithMoreRoomThenTheShorterQueueThenLessUnderwayIsChosen(t *testing.T) {
	for name, test := range map[string]struct {
		best, other *engine
	}{
		"room":                       {&engine{status: statusOf(700, 9)}, &engine{status: statusOf(300, 0)}},
		"a few blocks are no room":   {&engine{status: statusOf(701, 0)}, &engine{status: statusOf(709, 1)}},
		"underway":                   {&engine{status: statusOf(701, 0)}, &engine{status: statusOf(709, 0), underway: 1}},
		"free blocks, all else same": {&engine{status: statusOf(709, 0)}, &engine{status: statusOf(701, 0)}},
		"an unknown admission":       {&engine{status: statusOf(1, 9)}, &engine{status: &pb.EngineStatus{Admission: 99}}},
		"unreachable":                {&engine{status: statusOf(1, 9)}, &engine{}},
	} {
		for _, engines := range [][]*engine{{test.best, test.other}, {test.other, test.best}} {
			if chosen := (&fleet{engines: engines}).choose("", nil); chosen != test.best {
				t.Errorf("%s: %v", name, chosen)
			}
		}
	}
}

func TestTheFullestGroupCountsAndSoftBlocksAreFree(t *testing.T) {
	free, eighths := roomOf([]*pb.GroupLoad{
		{BlockCount: 100, FreeBlockCount: 90},
		{BlockCount: 8, FreeBlockCount: 1, SoftBlockCount: 3},
	})
	if free != 4 || eighths != 4 {
		t.Errorf("%d %d", free, eighths)
	}
}
