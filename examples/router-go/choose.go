package main

import (
	"cmp"
	"slices"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// load of an engine, as far as it matters to a choice.
type load struct {
	takesWork bool
	// room is how many eighths of the pool are free. Coarse, so that a few blocks do not outweigh a queue.
	room int
	// queue is how many transfers wait for their turn.
	queue int
	// underway are the steps that the engine does for this router: its next status will show them.
	underway int
	free     int
}

// choose returns the engine of a role that is best off, or nil where none takes work. It leaves out those that a
// request is to avoid.
func (f *fleet) choose(role role, avoid map[*engine]bool) *engine {
	var best *engine
	var least load
	for _, e := range f.engines {
		if e.role != role || avoid[e] {
			continue
		}
		now := e.load()
		if now.takesWork && (best == nil || now.better(least)) {
			best, least = e, now
		}
	}
	return best
}

func (l load) better(than load) bool {
	return cmp.Or(
		-cmp.Compare(l.room, than.room),
		cmp.Compare(l.queue, than.queue),
		cmp.Compare(l.underway, than.underway),
		-cmp.Compare(l.free, than.free),
	) < 0
}

// load of an engine. One that drains, is too full, has no engine behind its lead or cannot be reached takes no work.
func (e *engine) load() load {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.status == nil || !kvgrpc.TakesWork(e.status.Admission) {
		return load{}
	}
	free, room := roomOf(e.status.Groups)
	return load{true, room, int(e.status.WaitingTurnCount), e.underway, free}
}

// takesWork says whether new work may be given to the engine now.
func (e *engine) takesWork() bool { return e.load().takesWork }

// roomOf is the number of free blocks, and the eighths of the pool that they are: those of the fullest group. Soft
// blocks count as free, since the engine takes them back when it needs them.
func roomOf(groups []*pb.GroupLoad) (free, eighths int) {
	if len(groups) == 0 {
		return 0, 0
	}
	fullest := slices.MinFunc(groups, func(a, b *pb.GroupLoad) int { return cmp.Compare(share(a), share(b)) })
	return usable(fullest), int(8 * share(fullest))
}

func usable(group *pb.GroupLoad) int { return int(group.FreeBlockCount) + int(group.SoftBlockCount) }

func share(group *pb.GroupLoad) float64 {
	return float64(usable(group)) / float64(max(group.BlockCount, 1))
}
