package main

import (
	"context"
	"testing"
	"time"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func of(incarnation uint64) kvgrpc.EngineUpdate {
	return kvgrpc.EngineUpdate{Response: &pb.WatchEngineResponse{
		Header: &pb.ResponseHeader{Incarnation: incarnation}, Status: &pb.EngineStatus{},
	}}
}

func TestALifeEndsWithTheNextIncarnationAndNotWithASecondLook(t *testing.T) {
	e := &engine{}
	e.learn(of(1))
	ctx, done := e.within(t.Context())
	defer done()
	e.learn(of(1))
	if ctx.Err() != nil {
		t.Fatal("the same life is over")
	}
	e.learn(of(2))
	<-ctx.Done()
	if context.Cause(ctx) != errLifeOver {
		t.Error(context.Cause(ctx))
	}
	if next, done := e.within(t.Context()); next.Err() != nil {
		t.Error("the next life is over, too")
		done()
	}
}

func TestALifeOutlastsAConnectionThatStandsAgainSoon(t *testing.T) {
	e := &engine{lifeGrace: 100 * time.Millisecond}
	e.learn(of(1))
	ctx, done := e.within(t.Context())
	defer done()
	e.learn(kvgrpc.EngineUpdate{Unreachable: context.DeadlineExceeded})
	e.learn(of(1))
	select {
	case <-ctx.Done():
		t.Error("it is over")
	case <-time.After(3 * e.lifeGrace):
	}
}

func TestALifeEndsWhenItsConnectionStaysAway(t *testing.T) {
	e := &engine{lifeGrace: time.Millisecond}
	e.learn(of(1))
	ctx, done := e.within(t.Context())
	defer done()
	e.learn(kvgrpc.EngineUpdate{Unreachable: context.DeadlineExceeded})
	next(t, ctx.Done())
	if context.Cause(ctx) != errLifeOver {
		t.Error(context.Cause(ctx))
	}
}

func TestNothingIsWaitedForAtALeadThatIsGone(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive", "drive"})
	first := s.world.leads[s.router.fleet.choose(decode, nil).lead]
	first.holds = true
	served := make(chan struct{})
	go func() {
		defer close(served)
		s.served(t)
	}()
	until(t, func() bool { return first.called("WaitTransfer") > 0 })
	first.grpc.Stop()
	next(t, served)
	if len(s.p[0].works) != 1 {
		t.Error("it was prefilled again")
	}
}
