package main

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// serving runs the router as its program does. The returned function ends it and waits for that.
func (s *stage) serving(t *testing.T) (stop func()) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.url = "http://" + listener.Addr().String()
	s.router.options.drain = 10 * time.Millisecond
	stopping, end := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- serve(stopping, s.router, listener) }()
	return func() {
		end()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

type asked struct {
	status int
	body   string
	err    error
}

// asking sends a request in the background.
func (s *stage) asking(t *testing.T, more string) <-chan asked {
	got := make(chan asked, 1)
	go func() {
		status, body, err := s.ask(t.Context(), more)
		got <- asked{status, body, err}
	}()
	return got
}

func TestHalfAnAnswerIsCutWhenTheRouterEnds(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	s.d[0].stalls = true
	stop := s.serving(t)
	got := s.asking(t, `, "stream": true`)
	until(t, func() bool {
		s.d[0].mu.Lock()
		defer s.d[0].mu.Unlock()
		return len(s.d[0].works) > 0
	})
	time.Sleep(100 * time.Millisecond) // by then the first token goes to the client
	stop()
	if half := <-got; half.err == nil || !strings.Contains(half.body, "data:") {
		t.Errorf("it looks like a whole answer: %+v", half)
	}
	s.atRest(t)
}

func TestARequestThatIsNotAnsweredWhenTheRouterEndsIsNoEmptyAnswer(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	s.p[0].waits = make(chan struct{})
	stop := s.serving(t)
	got := s.asking(t, "")
	next(t, s.p[0].came)
	stop()
	if none := <-got; none.status != http.StatusServiceUnavailable || none.err != nil {
		t.Errorf("%+v", none)
	}
	s.atRest(t)
}

func TestRequestsThatAreCutMayTakeAsLongAsTheirLastCalls(t *testing.T) {
	if usual := 10 * time.Second; cutGrace <= usual {
		t.Errorf("a call has %v, requests %v", usual, cutGrace)
	}
}
