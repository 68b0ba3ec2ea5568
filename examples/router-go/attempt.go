package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"kvgrpc.dev/kvgrpc"
)

// attempt is one try of a request under one transfer key, and what it holds at engines.
type attempt struct {
	*request
	// id labels the attempt's transfers. Leads search by it but match nothing by it.
	id string
	// key pairs the two sides of the transfer, and cancels it. It is a secret.
	key []byte

	// later runs work that the client does not wait for. The router waits for it before it ends.
	later func(func())

	mu sync.Mutex
	// held has an entry for each engine that was told the key.
	held map[*engine]*holding
}

// holding is what an attempt has at one engine.
type holding struct {
	allocations map[string]*allocation
	// abandoned is set when another engine has taken over this one's part.
	abandoned bool
}

// allocation is a set of blocks that an attempt has taken.
type allocation struct {
	// stop ends its renewals.
	stop context.CancelFunc
	// computation is what may write the blocks now; "" where nothing does.
	computation string
}

// begin starts an attempt.
func (r *router) begin(request *request) *attempt {
	request.attempts++
	id := request.id
	if request.attempts > 1 {
		id = fmt.Sprintf("%s.%d", id, request.attempts)
	}
	return &attempt{
		request: request, id: id, key: kvgrpc.NewTransferKey(), later: r.ending.Go, held: map[*engine]*holding{},
	}
}

// tell records that an engine is about to be told the key. From now on the attempt must be cleaned up there.
func (a *attempt) tell(e *engine) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of(e)
}

// abandon records whether an engine has failed, so that another one takes over, unless the same engine tries again.
func (a *attempt) abandon(e *engine, failed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of(e).abandoned = failed
}

// hold records an allocation. It is renewed until it is let go.
func (a *attempt) hold(e *engine, id string, stop context.CancelFunc) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of(e).allocations[id] = &allocation{stop: stop}
}

// write records which computation may write an allocation from now on; "" means that none may.
func (a *attempt) write(e *engine, id, computation string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if held := a.of(e).allocations[id]; held != nil {
		held.computation = computation
	}
}

// letGo ends the renewals of an allocation, and the caller frees it. It returns false when the allocation was already
// let go, or may still be written; then it is left to the attempt's end.
func (a *attempt) letGo(e *engine, id string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := a.of(e).allocations[id]
	if held == nil || held.computation != "" {
		return false
	}
	held.stop()
	delete(a.of(e).allocations, id)
	return true
}

func (a *attempt) of(e *engine) *holding {
	if a.held[e] == nil {
		a.held[e] = &holding{allocations: map[string]*allocation{}}
	}
	return a.held[e]
}

// left is what an attempt had, by engine: allocations to free with a cancel, allocations only to free, and allocations
// to free once their computation has stopped.
type left struct {
	cancelled, freed map[*engine][]string
	written          []writing
}

// writing is an allocation that may still be written.
type writing struct {
	at              *engine
	id, computation string
}

// leave ends all renewals, and returns what is left to end. After a failure that is everything; after a success it is
// only what was abandoned.
func (a *attempt) leave(failed bool) left {
	a.mu.Lock()
	defer a.mu.Unlock()
	l := left{cancelled: map[*engine][]string{}, freed: map[*engine][]string{}}
	for e, holding := range a.held {
		var quiet []string
		for _, id := range slices.Sorted(maps.Keys(holding.allocations)) {
			held := holding.allocations[id]
			held.stop()
			if held.computation == "" {
				quiet = append(quiet, id)
			} else {
				l.written = append(l.written, writing{e, id, held.computation})
			}
		}
		switch {
		case failed || holding.abandoned:
			l.cancelled[e] = quiet
		case len(quiet) > 0:
			l.freed[e] = quiet
		}
	}
	clear(a.held)
	return l
}
