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
	// id labels the attempt's transfers. Leads search by it and match nothing.
	id string
	// key pairs the two sides of the transfer, and cancels it. It is a secret.
	key []byte

	// later runs what the client does not wait for, and the router before it ends.
	later func(func())

	mu sync.Mutex
	// held is of each engine that was told the key.
	held map[*engine]*holding
}

// holding is what an attempt has at one engine.
type holding struct {
	allocations map[string]*allocation
	// abandoned: another engine took its part.
	abandoned bool
}

// allocation is blocks that an attempt has taken.
type allocation struct {
	// stop ends its renewals.
	stop context.CancelFunc
	// computation is what may write the blocks now; empty where nothing does.
	computation string
}

// begin begins an attempt.
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

// tell notes that an engine is about to be told the key: from now on the attempt has to be cleaned up there.
func (a *attempt) tell(e *engine) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of(e)
}

// abandon notes whether an engine has failed, so that another one takes over, unless the same does it after all.
func (a *attempt) abandon(e *engine, failed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of(e).abandoned = failed
}

// hold notes an allocation, which is renewed until it is let go.
func (a *attempt) hold(e *engine, id string, stop context.CancelFunc) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of(e).allocations[id] = &allocation{stop: stop}
}

// write notes which computation may write an allocation from now on; empty: none does any more.
func (a *attempt) write(e *engine, id, computation string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if held := a.of(e).allocations[id]; held != nil {
		held.computation = computation
	}
}

// letGo ends the renewals of an allocation, which the caller frees. False: it was let go already, or may still be
// written, and is left to the attempt's end.
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

// left is what an attempt had, by engine: allocations to free with a cancel, to free only, and to free once their
// computation has stopped.
type left struct {
	cancelled, freed map[*engine][]string
	written          []writing
}

// writing is an allocation that may still be written.
type writing struct {
	at              *engine
	id, computation string
}

// leave ends all renewals, and returns what is left to end. After a failure everything is cancelled; after a success
// what was abandoned.
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
