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

	mu sync.Mutex
	// held is of each engine that was told the key.
	held map[*engine]*holding
}

// holding is what an attempt has at one engine.
type holding struct {
	// allocations, each with what ends its renewals.
	allocations map[string]context.CancelFunc
	// abandoned: another engine took its part.
	abandoned bool
}

// begin begins an attempt.
func (r *router) begin(request *request) *attempt {
	request.attempts++
	id := request.id
	if request.attempts > 1 {
		id = fmt.Sprintf("%s.%d", id, request.attempts)
	}
	return &attempt{request: request, id: id, key: kvgrpc.NewTransferKey(), held: map[*engine]*holding{}}
}

// tell notes that an engine is about to be told the key: from now on the attempt has to be cleaned up there.
func (a *attempt) tell(e *engine) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of(e)
}

// abandon notes that another engine takes over.
func (a *attempt) abandon(e *engine) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of(e).abandoned = true
}

// hold notes an allocation, which is renewed until it is let go.
func (a *attempt) hold(e *engine, allocation string, renewals context.CancelFunc) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of(e).allocations[allocation] = renewals
}

// letGo ends the renewals of an allocation, which someone else frees. False: it was let go already.
func (a *attempt) letGo(e *engine, allocation string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := a.of(e).allocations
	stop := held[allocation]
	delete(held, allocation)
	if stop == nil {
		return false
	}
	stop()
	return true
}

func (a *attempt) of(e *engine) *holding {
	if a.held[e] == nil {
		a.held[e] = &holding{allocations: map[string]context.CancelFunc{}}
	}
	return a.held[e]
}

// leave ends all renewals, and returns what is to be cancelled and what is to be freed only, by engine. After a
// failure everything is cancelled; after a success what was abandoned.
func (a *attempt) leave(failed bool) (cancelled, freed map[*engine][]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	cancelled, freed = map[*engine][]string{}, map[*engine][]string{}
	for e, holding := range a.held {
		for _, stop := range holding.allocations {
			stop()
		}
		allocations := slices.Sorted(maps.Keys(holding.allocations))
		switch {
		case failed || holding.abandoned:
			cancelled[e] = allocations
		case len(allocations) > 0:
			freed[e] = allocations
		}
	}
	clear(a.held)
	return cancelled, freed
}
