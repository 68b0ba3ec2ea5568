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
	// TransferKey ends all transfers of the request there, later ones included. It is used unless TransferID is set.
	TransferKey []byte
	// TransferID ends one transfer.
	TransferID string
	// FreeAllocationIDs are the allocations to free as well.
	FreeAllocationIDs []string
}

// String omits the key, because it is a secret.
func (s Side) String() string {
	if s.TransferID != "" {
		return fmt.Sprintf("{TransferID:%s FreeAllocationIDs:%v}", s.TransferID, s.FreeAllocationIDs)
	}
	return fmt.Sprintf("{TransferKey:[REDACTED] FreeAllocationIDs:%v}", s.FreeAllocationIDs)
}

// SideResult is the result of one side.
type SideResult struct {
	// Response is nil where the side failed. See also [Outcome].
	Response *pb.CancelTransferResponse
	// Err says why nothing was cancelled or freed there.
	Err error
}

// CleanUp cancels a request at all sides and frees its allocations there, in parallel. A failure of one side does not
// stop the others. The results are in the order of the sides. CleanUp continues after ctx has ended, because that is a
// common reason to clean up. Each call has the default deadline.
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
