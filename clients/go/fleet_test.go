package kvgrpc

import (
	"context"
	"iter"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// ids returns the engine ids of entries.
func ids(engines []*pb.FleetEngine) string {
	var found []string
	for _, engine := range engines {
		found = append(found, engine.EngineId)
	}
	return strings.Join(found, " ")
}

// lists reads a watch into a channel until the test ends.
func lists(t *testing.T, fleet *Fleet) <-chan FleetEngines {
	read := make(chan FleetEngines)
	ctx := limited(t)
	go forward(ctx, fleet.WatchEngines(ctx, nil), read)
	return read
}

func forward[T any](ctx context.Context, from iter.Seq[T], to chan<- T) {
	defer close(to)
	for each := range from {
		select {
		case to <- each:
		case <-ctx.Done():
			return
		}
	}
}

// nobody returns an address at which nobody listens.
func nobody(t *testing.T) *server {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return &server{address: listener.Addr().String()}
}

func TestAListingHasTheEntriesOfAllPages(t *testing.T) {
	there := newFleetServer(1, member("a", healthy), member("b", failed), member("c", healthy))
	there.pageSize = 2
	engines, err := connectFleet(t, serve(t, "", there)).ListEngines(limited(t), nil)
	if err != nil || ids(engines) != "a b c" {
		t.Fatal(engines, err)
	}
}

func TestACallGoesToTheNextServerWhereOneIsAwayOrHasNoRegistry(t *testing.T) {
	there := newFleetServer(1)
	there.pick = func(_ context.Context, r *pb.PickPairRequest) (*pb.PickPairResponse, error) {
		return &pb.PickPairResponse{Reason: r.ModelName + " without " + strings.Join(r.ExcludedEngineIds, " ")}, nil
	}
	without := newFleetServer(2)
	without.pick = func(context.Context, *pb.PickPairRequest) (*pb.PickPairResponse, error) {
		return nil, refusal(codes.Unimplemented, "FEATURE_UNAVAILABLE", "FIX_REQUEST")
	}
	fleet := connectFleet(t, nobody(t), serve(t, "", without), serve(t, "", there))
	request := &pb.PickPairRequest{ModelName: "m", ExcludedEngineIds: []string{"x", "y"}}
	for range 2 {
		reply, err := fleet.PickPair(limited(t), request)
		if err != nil || reply.Reason != "m without x y" {
			t.Fatal(reply, err)
		}
	}
}

func TestARefusalIsNotRepeatedAtAnotherServer(t *testing.T) {
	var calls []string
	answers := func(name string) *fleetServer {
		made := newFleetServer(1)
		made.pick = func(context.Context, *pb.PickPairRequest) (*pb.PickPairResponse, error) {
			calls = append(calls, name)
			return nil, refusal(codes.InvalidArgument, "INVALID_FIELD", "FIX_REQUEST")
		}
		return made
	}
	_, err := connectFleet(t, serve(t, "", answers("a")), serve(t, "", answers("b"))).PickPair(limited(t), nil)
	if status.Code(err) != codes.InvalidArgument || !slices.Equal(calls, []string{"a"}) {
		t.Fatal(err, calls)
	}
}

func TestServersThatAllLackARegistryEndACallAtOnce(t *testing.T) {
	_, err := connectFleet(t, serve(t, "", &transfers{}), serve(t, "", &transfers{})).PickPair(limited(t), nil)
	if status.Code(err) != codes.Unimplemented {
		t.Fatal(err)
	}
}

func TestAWatchYieldsAllEntriesAfterEachChange(t *testing.T) {
	there := newFleetServer(1, member("b", healthy), member("a", notAsked))
	read := lists(t, connectFleet(t, serve(t, "", there)))
	if got := next(t, read); ids(got.Engines) != "a b" || ids(got.Usable) != "b" || got.Stale != nil {
		t.Fatal(got)
	}
	there.put(member("a", healthy), member("c", healthy))
	if got := next(t, read); ids(got.Engines) != "a b c" || ids(got.Usable) != "a b c" {
		t.Fatal(got)
	}
	there.put(member("b", draining))
	if got := next(t, read); ids(got.Engines) != "a b c" || ids(got.Usable) != "a c" {
		t.Fatal(got)
	}
	there.remove("a")
	if got := next(t, read); ids(got.Engines) != "b c" || ids(got.Usable) != "c" {
		t.Fatal(got)
	}
}

func TestAWatchThatBreaksKeepsItsListAndGoesOnAfterItsRevision(t *testing.T) {
	there := newFleetServer(1, member("a", healthy))
	server := serve(t, "", there)
	read := lists(t, connectFleet(t, server))
	next(t, read)
	server.cut()
	if got := next(t, read); ids(got.Usable) != "a" || status.Code(got.Stale) != codes.Unavailable {
		t.Fatal(got)
	}
	if got := next(t, read); ids(got.Usable) != "a" || got.Stale != nil {
		t.Fatal(got)
	}
	there.put(member("b", healthy))
	if got := next(t, read); ids(got.Usable) != "a b" {
		t.Fatal(got)
	}
	if asked := there.watches(); !slices.Equal(asked, []string{"", "1/0"}) {
		t.Fatal(asked)
	}
}

func TestAWatchGoesOnAtAnotherServerWithoutAGap(t *testing.T) {
	first := newFleetServer(1, member("a", healthy), member("b", healthy), member("c", healthy))
	second := newFleetServer(2, member("a", notAsked), member("b", draining), member("d", notAsked))
	one, other := serve(t, "", first), serve(t, "", second)
	read := lists(t, connectFleet(t, one, other))
	next(t, read)
	one.grpc.Stop()
	got := next(t, read)
	if ids(got.Engines) != "a b d" || ids(got.Usable) != "a" || got.Stale != nil {
		t.Fatal("a, which was healthy, is usable until the other server has asked it", got)
	}
	second.put(member("a", failed))
	if got := next(t, read); ids(got.Usable) != "" {
		t.Fatal(got)
	}
	second.put(member("a", notAsked))
	if got := next(t, read); ids(got.Usable) != "" {
		t.Fatal("nothing that the other server has found out is forgotten", got)
	}
}

func TestTheWordOfAnEarlierServerCountsForALimitedTime(t *testing.T) {
	view, now := &fleetView{}, time.Now()
	tell := func(incarnation uint64, state pb.EngineState, after time.Duration) string {
		news := view.begin()
		reply := &pb.WatchEnginesResponse{
			Header: header(0, incarnation), Snapshot: true, Engines: []*pb.FleetEngine{member("a", state)}, Complete: true,
		}
		news.take(reply)
		view.learn(news, reply, now.Add(after))
		return ids(view.as(nil).Usable)
	}
	if tell(1, healthy, 0) != "a" || tell(2, notAsked, 0) != "a" || tell(2, notAsked, fleetTrust) != "a" {
		t.Fatal("an engine that was healthy does not count")
	}
	if tell(2, notAsked, fleetTrust+1) != "" {
		t.Fatal("an engine that was healthy counts for ever")
	}
}

func TestAServerOfTheFleetThatFallsSilentIsLeft(t *testing.T) {
	silent, there := newFleetServer(1, member("a", healthy)), newFleetServer(2, member("b", healthy))
	fleet := connectFleet(t, serve(t, "", silent), serve(t, "", there))
	fleet.clients[0].silence = 50 * time.Millisecond
	read := lists(t, fleet)
	next(t, read)
	if got := next(t, read); ids(got.Usable) != "b" || got.Stale != nil {
		t.Fatal(got)
	}
}

func TestAWatchOfAFleetEndsWithItsContextAndWithTheFleet(t *testing.T) {
	there := serve(t, "", newFleetServer(1))
	ctx, cancel := context.WithCancel(limited(t))
	for range connectFleet(t, there).WatchEngines(ctx, nil) {
		cancel()
	}
	cancel()
	fleet := connectFleet(t, there)
	for range fleet.WatchEngines(limited(t), nil) {
		fleet.Close()
	}
}
