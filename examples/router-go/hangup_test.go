package main

import (
	"context"
	"net/http"
	"slices"
	"testing"
	"time"
)

// hangUp sends a request, waits until `when` returns, and hangs up.
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

// cancelledAt reports whether all these engines were told the same key.
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
		s.d[0].holds = true // the pull continues until it is cancelled
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

// heldWhileWritten expects that an engine's blocks stay allocated until the engine no longer writes them.
func (s *stage) heldWhileWritten(t *testing.T, e *llm, lingers chan struct{}) {
	t.Helper()
	until(t, func() bool { return cancelledAt(s.p[0], s.d[0]) || e == s.p[0] && cancelledAt(e) })
	until(t, func() bool { return e.told() == 1 })
	time.Sleep(50 * time.Millisecond) // gives a wrong router time to fail; a correct one passes at any length
	if left := e.holding(); len(left) != 1 || e.called("FreeBlocks") > 0 {
		t.Errorf("blocks are freed that the engine writes: %v", left)
	}
	close(lingers)
	s.atRest(t)
}

func TestBlocksThatAnEngineStillWritesAreNotFreed(t *testing.T) {
	for _, role := range []role{prefill, decode} {
		t.Run(string(role), func(t *testing.T) {
			s := on(t, "pull", []string{"drive"}, []string{"drive"})
			e := s.p[0]
			if role == decode {
				e = s.d[0]
			}
			lingers := make(chan struct{})
			e.waits, e.lingers = make(chan struct{}), lingers
			s.hangUp(t, func() { next(t, e.came) })
			if role == decode {
				e.set(func() { e.calls = nil })
			}
			s.heldWhileWritten(t, e, lingers)
		})
	}
}

func TestBlocksOfAComputationWhoseConnectionBreaksAreNotFreedBeforeItsEnd(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	lingers := make(chan struct{})
	s.d[0].cut, s.d[0].lingers = true, lingers
	if _, body, err := s.ask(t.Context(), `, "stream": true`); err == nil {
		t.Errorf("it looks like a whole answer: %s", body)
	}
	s.heldWhileWritten(t, s.d[0], lingers)
}

func TestBlocksAreLeftToTheirTimeWhereNoEngineSaysThatItHasStopped(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	s.p[0].waits, s.p[0].unstoppable = make(chan struct{}), true
	s.hangUp(t, func() { next(t, s.p[0].came) })
	until(t, func() bool { return s.p[0].told() == 1 })
	s.router.ending.Wait()
	if left := s.p[0].holding(); len(left) != 1 || s.p[0].called("FreeBlocks") > 0 {
		t.Errorf("%v", left)
	}
}

func TestARefusalToComputeFreesAtOnce(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	s.p[0].statuses, s.p[0].unstoppable = []int{http.StatusBadRequest}, true
	if status, _, _ := s.ask(t.Context(), ""); status != http.StatusBadRequest {
		t.Error(status)
	}
	s.atRest(t)
}

func TestWhatIsAllocatedWhileAClientLeavesIsGivenBack(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	for after := range 20 { // at different moments of the request
		ctx, leave := context.WithTimeout(t.Context(), time.Duration(after)*time.Millisecond)
		_, _, _ = s.ask(ctx, "")
		leave()
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
	until(t, func() bool { return len(s.p[0].holding())+len(s.d[0].holding()) == 0 })
}
