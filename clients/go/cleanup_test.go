package kvgrpc

import (
	"context"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func TestEachSideIsToldOfACleanUpAlsoWhenAnotherFails(t *testing.T) {
	var mu sync.Mutex
	got := map[string]*pb.CancelTransferRequest{}
	// Each answer waits for both requests, because CleanUp tells the sides in parallel.
	var both sync.WaitGroup
	both.Add(2)
	side := func(name string, err error) *Client {
		return connect(t, serve(t, "", &transfers{
			cancel: func(_ context.Context, r *pb.CancelTransferRequest) (*pb.CancelTransferResponse, error) {
				mu.Lock()
				got[name] = r
				mu.Unlock()
				both.Done()
				both.Wait()
				return &pb.CancelTransferResponse{Outcome: pb.CancelOutcome_CANCEL_OUTCOME_TOMBSTONED}, err
			},
		}), Options{})
	}
	over, cancel := context.WithCancel(context.Background())
	cancel() // a request that was given up is cleaned up as well
	results := CleanUp(over, "gave up",
		Side{Client: side("P", refusal(codes.NotFound, "TRANSFER_NOT_FOUND", "RECOMPUTE")), TransferID: "t"},
		Side{Client: side("D", nil), TransferKey: []byte("key"), FreeAllocationIDs: []string{"a"}})
	if status.Code(results[0].Err) != codes.NotFound || results[0].Response != nil {
		t.Errorf("%+v", results[0])
	}
	if results[1].Err != nil || Outcome(results[1].Response) != pb.CancelOutcome_CANCEL_OUTCOME_TOMBSTONED {
		t.Errorf("%+v", results[1])
	}
	if p := got["P"]; p.GetTransferId() != "t" || p.Message != "gave up" || p.IdempotencyKey == "" {
		t.Errorf("%v", p)
	}
	if d := got["D"]; string(d.GetTransferKey()) != "key" || d.FreeAllocationIds[0] != "a" {
		t.Errorf("%v", d)
	}
}
