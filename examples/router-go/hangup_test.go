package main

import (
	"context"
	"slices"
	"testing"
	"time"
)

// hangUp asks, waits until `when` says that it is time, and leaves.
func (s *stage) hangUp(t *testing.T, when func()) {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, _, err := s.ask(ctx, "")
		gone <- err
	}()
	when()
	leave()
	if err := <-gone; err == nil {
		t.Error("it was answered")
	}
}

// cancelledAt says whether all engines were told the same key.
func cancelledAt(engines ...*llm) bool {
	var keys [][]byte
	for _, e := range engines {
		e.lead.mu.Lock()
		keys = append(keys, e.cancelled...)
		e.lead.mu.Unlock()
	}
	return len(keys) == len(engines) && slices.EqualFunc(keys[1:], keys[:len(keys)-1], slices.Equal)
}

func TestAClientThatLeavesBeforePrefillIsDoneEndsItAtP(t *testing.T) {
	each(t, "pull", func(t *testing.T, s *stage) {
		s.p[0].waits = make(chan struct{})
		s.hangUp(t, func() { next(t, s.p[0].came) })
		until(t, func() bool { return cancelledAt(s.p[0]) })
		s.atRest(t)
		if s.d[0].called("AllocateBlocks")+len(s.d[0].bodies) > 0 {
			t.Error("D was asked")
		}
	})
}

func TestAClientThatLeavesBetweenPrefillAndDecodeEndsItAtBothSides(t *testing.T) {
	each(t, "pull", func(t *testing.T, s *stage) {
		s.d[0].holds = true // the pull goes on until it is cancelled
		s.hangUp(t, func() {
			until(t, func() bool { return slices.ContainsFunc(s.d[0].holding(), func(string) bool { return true }) })
		})
		until(t, func() bool { return cancelledAt(s.p[0], s.d[0]) })
		s.atRest(t)
	})
}

func TestAClientThatLeavesDuringDecodeEndsItAtBothSides(t *testing.T) {
	for _, mode := range []string{"pull", "push"} {
		each(t, mode, func(t *testing.T, s *stage) {
			s.d[0].waits = make(chan struct{})
			s.hangUp(t, func() { next(t, s.d[0].came) })
			until(t, func() bool { return cancelledAt(s.p[0], s.d[0]) })
			s.atRest(t)
		})
	}
}

func TestWhatIsAllocatedWhileAClientLeavesIsGivenBack(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	ctx, leave := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer leave()
	for range 20 { // wherever it is hit
		_, _, _ = s.ask(ctx, "")
	}
	until(t, func() bool {
		for _, e := range s.router.fleet.engines {
			e.mu.Lock()
			underway := e.underway
			e.mu.Unlock()
			if underway > 0 {
				return false
			}
		}
		return true
	})
	s.atRest(t)
}
