package main

import (
	"context"
	"net"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// registry is a fake FleetService. It picks the first engines that are not excluded.
type registry struct {
	pb.UnimplementedFleetServiceServer
	grpc    *grpc.Server
	address string

	mu      sync.Mutex
	engines []*pb.FleetEngine
	changed chan struct{} // closed at each change, and then replaced
	picks   []*pb.PickPairRequest
}

func newRegistry(t *testing.T) *registry {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	made := &registry{grpc: grpc.NewServer(), address: listener.Addr().String(), changed: make(chan struct{})}
	pb.RegisterFleetServiceServer(made.grpc, made)
	go made.grpc.Serve(listener)
	t.Cleanup(made.grpc.Stop)
	return made
}

// set replaces an engine's state, or adds the engine.
func (r *registry) set(e *llm, id string, role pb.EngineRole, state pb.EngineState, layout string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.engines = slices.DeleteFunc(slices.Clone(r.engines), func(one *pb.FleetEngine) bool { return one.EngineId == id })
	r.engines = append(r.engines, &pb.FleetEngine{
		EntryId: id, EngineId: id, Addresses: []string{e.address}, Role: role, State: state, LayoutDigest: layout,
	})
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *registry) PickPair(_ context.Context, asks *pb.PickPairRequest) (*pb.PickPairResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.picks = append(r.picks, asks)
	for _, p := range r.engines {
		for _, d := range r.engines {
			fits := p.Role == pb.EngineRole_ENGINE_ROLE_PREFILL && d.Role == pb.EngineRole_ENGINE_ROLE_DECODE &&
				p.LayoutDigest == d.LayoutDigest && (asks.LayoutDigest == "" || asks.LayoutDigest == p.LayoutDigest)
			for _, one := range []*pb.FleetEngine{p, d} {
				fits = fits && one.State == pb.EngineState_ENGINE_STATE_HEALTHY &&
					!slices.Contains(asks.ExcludedEngineIds, one.EngineId)
			}
			if fits {
				return &pb.PickPairResponse{
					Prefill: &pb.PickedEngine{Engine: p}, Decode: &pb.PickedEngine{Engine: d},
				}, nil
			}
		}
	}
	return &pb.PickPairResponse{Reason: "none fits"}, nil
}

func (r *registry) WatchEngines(
	_ *pb.WatchEnginesRequest, stream grpc.ServerStreamingServer[pb.WatchEnginesResponse],
) error {
	for {
		r.mu.Lock()
		message := &pb.WatchEnginesResponse{Snapshot: true, Engines: r.engines, Complete: true, Revision: "x"}
		changed := r.changed
		r.mu.Unlock()
		if err := stream.Send(message); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

const (
	prefills = pb.EngineRole_ENGINE_ROLE_PREFILL
	decodes  = pb.EngineRole_ENGINE_ROLE_DECODE
	healthy  = pb.EngineState_ENGINE_STATE_HEALTHY
)

// found starts engines that a fleet knows, and a router that asks it.
func found(t *testing.T, mode string, p, d int) (*stage, *registry) {
	t.Helper()
	s, r := &stage{world: newWorld()}, newRegistry(t)
	arguments := []string{"-mode", mode, "-fleet", r.address, "-model", "tiny"}
	for i := range p + d {
		e := s.newLLM(t)
		id := "e" + string(rune('0'+i))
		arguments = append(arguments, "-http", id+"=relay,"+e.http.URL)
		if i < p {
			s.p = append(s.p, e)
			r.set(e, id, prefills, healthy, "same")
		} else {
			s.d = append(s.d, e)
			r.set(e, id, decodes, healthy, "same")
		}
	}
	o, err := parse(arguments)
	if err != nil {
		t.Fatal(err)
	}
	o.lifeGrace = 200 * time.Millisecond
	if s.router, err = newRouter(o); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(s.router.handler())
	s.url = server.URL
	t.Cleanup(func() {
		server.Close()
		s.router.close()
	})
	s.takesWork(t, p+d)
	return s, r
}

// takesWork waits until so many engines take work.
func (s *stage) takesWork(t *testing.T, count int) {
	t.Helper()
	until(t, func() bool {
		all := s.router.fleet.all()
		return len(all)-len(slices.DeleteFunc(slices.Clone(all), (*engine).takesWork)) == count
	})
}

func (e *llm) served() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.bodies)
}

func TestAPairThatTheFleetPicksServesARequest(t *testing.T) {
	for _, mode := range []string{"pull", "push"} {
		s, r := found(t, mode, 2, 2)
		s.served(t)
		if s.p[0].served() != 1 || s.d[0].served() != 1 || len(r.picks) != 1 || r.picks[0].ModelName != "tiny" {
			t.Fatal(mode, s.p[0].served(), s.d[0].served(), r.picks)
		}
		s.atRest(t)
	}
}

func TestAnEngineThatFailsIsExcludedAndAnotherOneOfItsLayoutIsPicked(t *testing.T) {
	s, r := found(t, "pull", 2, 2)
	s.p[0].statuses, s.d[0].statuses = []int{503}, []int{503}
	s.served(t)
	if s.p[1].served() != 1 || s.d[1].served() != 1 {
		t.Fatal(s.p[1].served(), s.d[1].served())
	}
	last := r.picks[len(r.picks)-1]
	if !slices.Contains(last.ExcludedEngineIds, "e2") || last.LayoutDigest != "same" {
		t.Fatal(last)
	}
	s.atRest(t)
}

func TestEnginesComeAndGoWithTheList(t *testing.T) {
	s, r := found(t, "pull", 2, 1)
	r.set(s.p[0], "e0", prefills, pb.EngineState_ENGINE_STATE_DRAINING, "same")
	s.takesWork(t, 2)
	s.served(t)
	if s.p[0].served() != 0 || s.p[1].served() != 1 {
		t.Fatal("a draining engine got work")
	}
	r.set(s.p[0], "e0", prefills, healthy, "same")
	s.takesWork(t, 3)
	s.atRest(t)
}

func TestRequestsGoOnWhileTheFleetIsAwayWithEnginesOfOneLayout(t *testing.T) {
	s, r := found(t, "pull", 1, 2)
	r.set(s.d[0], "e1", decodes, healthy, "other")
	until(t, func() bool {
		return slices.ContainsFunc(s.router.fleet.all(), func(e *engine) bool {
			return s.router.fleet.entryOf(e).GetLayoutDigest() == "other"
		})
	})
	r.grpc.Stop()
	for range 3 {
		s.served(t)
	}
	if s.d[0].served() != 0 || s.d[1].served() != 3 {
		t.Fatal(s.d[0].served(), s.d[1].served())
	}
	s.atRest(t)
}

func TestARuleForAnEngineComesBeforeTheRuleForAll(t *testing.T) {
	var given rules
	for _, text := range []string{"relay,http://{host}:8000/", "e1=drive,http://other"} {
		if err := given.Set(text); err != nil {
			t.Fatal(err)
		}
	}
	for id, want := range map[string]address{
		"e0": {"relay", "http://h:8000", "h:1"}, "e1": {"drive", "http://other", "h:1"},
	} {
		if got, err := given.address(&pb.FleetEngine{EngineId: id, Addresses: []string{"h:1"}}); err != nil || got != want {
			t.Error(got, err)
		}
	}
	for _, text := range []string{"relay", "cook,http://x", "=relay,http://x"} {
		if given.Set(text) == nil {
			t.Error(text)
		}
	}
	if _, err := parse([]string{"-fleet", "x:1"}); err == nil {
		t.Error("a fleet without a rule is no error")
	}
}
