package kvgrpc

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"google.golang.org/grpc"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

const (
	healthy  = pb.EngineState_ENGINE_STATE_HEALTHY
	draining = pb.EngineState_ENGINE_STATE_DRAINING
	failed   = pb.EngineState_ENGINE_STATE_FAILED
	notAsked = pb.EngineState_ENGINE_STATE_UNPROVEN
)

// fleetServer is a fake FleetService whose list a test changes.
type fleetServer struct {
	pb.UnimplementedFleetServiceServer
	incarnation uint64
	pageSize    int
	pick        func(context.Context, *pb.PickPairRequest) (*pb.PickPairResponse, error)

	mu      sync.Mutex
	engines []*pb.FleetEngine // in the order of their first appearance
	changes []*pb.WatchEnginesResponse
	changed chan struct{} // closed at each change, and then replaced
	asked   []string      // the revisions that watches began after
}

func newFleetServer(incarnation uint64, engines ...*pb.FleetEngine) *fleetServer {
	return &fleetServer{incarnation: incarnation, engines: engines, changed: make(chan struct{}), pageSize: 1000}
}

// member returns the entry of an engine.
func member(id string, state pb.EngineState, addresses ...string) *pb.FleetEngine {
	return &pb.FleetEngine{EntryId: "entry of " + id, EngineId: id, State: state, Addresses: addresses, ModelName: "m"}
}

// put adds or replaces entries, and tells the watches.
func (s *fleetServer) put(engines ...*pb.FleetEngine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, engine := range engines {
		s.removeLocked(engine.EntryId)
		s.engines = append(s.engines, engine)
	}
	s.tellLocked(&pb.WatchEnginesResponse{Engines: engines})
}

// remove removes the entry of an engine.
func (s *fleetServer) remove(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removeLocked("entry of " + id)
	s.tellLocked(&pb.WatchEnginesResponse{RemovedEntryIds: []string{"entry of " + id}})
}

func (s *fleetServer) removeLocked(entryID string) {
	var left []*pb.FleetEngine
	for _, engine := range s.engines {
		if engine.EntryId != entryID {
			left = append(left, engine)
		}
	}
	s.engines = left
}

func (s *fleetServer) tellLocked(change *pb.WatchEnginesResponse) {
	s.changes = append(s.changes, change)
	close(s.changed)
	s.changed = make(chan struct{})
}

// watches returns the revisions that watches began after.
func (s *fleetServer) watches() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.asked...)
}

func (s *fleetServer) revision(number int) string { return fmt.Sprintf("%d/%d", s.incarnation, number) }

func (s *fleetServer) ListEngines(_ context.Context, r *pb.ListEnginesRequest) (*pb.ListEnginesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var begin int
	if r.PageToken != "" {
		fmt.Sscan(r.PageToken, &begin)
	}
	page := &pb.ListEnginesResponse{Header: header(0, s.incarnation), Revision: s.revision(len(s.changes))}
	end := min(begin+s.pageSize, len(s.engines))
	page.Engines = s.engines[begin:end]
	if end < len(s.engines) {
		page.NextPageToken = fmt.Sprint(end)
	}
	return page, nil
}

func (s *fleetServer) PickPair(ctx context.Context, r *pb.PickPairRequest) (*pb.PickPairResponse, error) {
	return s.pick(ctx, r)
}

func (s *fleetServer) WatchEngines(
	r *pb.WatchEnginesRequest, stream grpc.ServerStreamingServer[pb.WatchEnginesResponse],
) error {
	s.mu.Lock()
	s.asked = append(s.asked, r.AfterRevision)
	known := -1
	for number := range len(s.changes) + 1 {
		if r.AfterRevision == s.revision(number) {
			known = number
		}
	}
	var told []*pb.WatchEnginesResponse
	if known < 0 {
		// A snapshot takes a message for each entry and one that completes it.
		known = len(s.changes)
		told = append(told, &pb.WatchEnginesResponse{Snapshot: true})
		for _, engine := range s.engines {
			told = append(told, &pb.WatchEnginesResponse{Engines: []*pb.FleetEngine{engine}})
		}
		told = append(told, &pb.WatchEnginesResponse{})
	} else {
		told = append(told, &pb.WatchEnginesResponse{})
	}
	for {
		told = append(told, s.changes[known:]...)
		known = len(s.changes)
		changed := s.changed
		s.mu.Unlock()
		for i, each := range told {
			message := &pb.WatchEnginesResponse{
				Header: header(0, s.incarnation), Snapshot: each.Snapshot, Engines: each.Engines,
				RemovedEntryIds: each.RemovedEntryIds,
			}
			if i == len(told)-1 {
				message.Complete, message.Revision = true, s.revision(known)
			}
			if err := stream.Send(message); err != nil {
				return err
			}
		}
		told = nil
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
		s.mu.Lock()
	}
}

// connectFleet returns a client of these servers.
func connectFleet(t *testing.T, servers ...*server) *Fleet {
	t.Helper()
	var addresses []string
	for _, server := range servers {
		addresses = append(addresses, server.address)
	}
	fleet, err := ConnectFleet(Options{}, addresses...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { fleet.Close() })
	return fleet
}
