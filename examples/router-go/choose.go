package main

import (
	"cmp"
	"slices"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// load is the load of an engine, as far as it matters to a choice.
type load struct {
	takesWork bool
	// room is how many eighths of the pool are free. It is coarse, so that a few blocks do not outweigh a queue.
	room int
	// queue is how many transfers wait for their turn.
	queue int
	// underway are the steps that the engine does for this router now. The engine's next status will include them.
	underway int
	free     int
}

// choose returns the best engine of a role, or nil where none takes work. It skips the engines that a request must
// avoid.
func (f *fleet) choose(role role, avoid map[*engine]bool) *engine {
	var best *engine
	var least load
	for _, e := range f.all() {
		if !e.plays(role) || avoid[e] {
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

// load returns the load of an engine. An engine takes no work when it drains, is too full, cannot be reached, or has a
// lead without an engine.
func (e *engine) load() load {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.barred || e.status == nil || !kvgrpc.TakesWork(e.status.Admission) {
		return load{}
	}
	free, room := roomOf(e.status.Groups)
	return load{true, room, int(e.status.WaitingTurnCount), e.underway, free}
}

// takesWork reports whether the engine may get new work now.
func (e *engine) takesWork() bool { return e.load().takesWork }

// roomOf returns the number of free blocks of the fullest group, and the eighths of the pool that they are. Soft blocks
// count as free, because the engine takes them back when it needs them.
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
