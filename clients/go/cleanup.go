package kvgrpc

import (
	"context"
	"fmt"
	"sync"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// Side is what a failed request has left at one engine.
type Side struct {
	Client *Client
	// TransferKey ends all transfers of the request there, also those still to come. It is used unless TransferID is set.
	TransferKey []byte
	// TransferID ends one transfer.
	TransferID string
	// FreeAllocationIDs are the allocations to free as well.
	FreeAllocationIDs []string
}

// String leaves the key out, which is a secret.
func (s Side) String() string {
	if s.TransferID != "" {
		return fmt.Sprintf("{TransferID:%s FreeAllocationIDs:%v}", s.TransferID, s.FreeAllocationIDs)
	}
	return fmt.Sprintf("{TransferKey:[REDACTED] FreeAllocationIDs:%v}", s.FreeAllocationIDs)
}

// SideResult is what one side said.
type SideResult struct {
	// Response is nil where the side failed. See also [Outcome].
	Response *pb.CancelTransferResponse
	// Err says why nothing was cancelled or freed there.
	Err error
}

// CleanUp cancels a request at all sides and frees its allocations there, in parallel: a side that fails does not keep
// the others from being told. The results are in the order of the sides. It goes on when ctx has ended, which is often
// why there is something to clean up; each call has the default deadline.
func CleanUp(ctx context.Context, message string, sides ...Side) []SideResult {
	ctx = context.WithoutCancel(ctx)
	results := make([]SideResult, len(sides))
	var all sync.WaitGroup
	for i, side := range sides {
		all.Go(func() {
			request := &pb.CancelTransferRequest{Message: message, FreeAllocationIds: side.FreeAllocationIDs}
			if side.TransferID != "" {
				request.Target = &pb.CancelTransferRequest_TransferId{TransferId: side.TransferID}
			} else {
				request.Target = &pb.CancelTransferRequest_TransferKey{TransferKey: side.TransferKey}
			}
			results[i].Response, results[i].Err = side.Client.Transfers.CancelTransfer(ctx, request)
		})
	}
	all.Wait()
	return results
}
