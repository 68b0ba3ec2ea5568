package kvgrpc

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// The default exceeds the sum of a server's defaults for queue, transfer and settle.
const defaultMove = 90 * time.Second

// TransferError returns the error of a transfer that ended without its KV, FAILED or CANCELLED. It returns nil for a
// transfer that succeeded or is not over. At the server such an end is not an error of a call: the calls that wait for
// the transfer return OK. The code of the error is ABORTED. Its reason and next step are those of the failure. Its
// Metadata has `transfer_id` and `phase`.
func TransferError(transfer *pb.Transfer) error {
	if !IsOver(transfer) || Succeeded(transfer) {
		return nil
	}
	failure := transfer.GetFailure()
	made := &Error{
		Code:     codes.Aborted,
		Reason:   ReasonName(failure.GetReason()),
		Next:     shortName(NextStep(failure), "NEXT_STEP_"),
		Message:  failure.GetMessage(),
		Metadata: map[string]string{"transfer_id": transfer.TransferId, "phase": phaseName(failure.GetPhase())},
	}
	if failure.GetReason() == pb.FailureReason_FAILURE_REASON_UNSPECIFIED {
		made.Reason = shortName(transfer.State, "TRANSFER_STATE_")
	}
	if made.Message == "" {
		made.Message = "the transfer ended without its KV"
	}
	return made
}

// Pull makes a pull whose destination is stated, and returns the transfer once the KV is in its blocks. Any other end
// is an *Error (see TransferError), and the transfer is returned with it. When the timeout is over, the error is
// DEADLINE_EXCEEDED and the transfer continues; CancelTransfer ends it. A timeout of 0 means 90 s. Set request.Wait to
// wait for the return of the memory as well.
func (c *Client) Pull(ctx context.Context, request *pb.PullBlocksRequest, timeout time.Duration) (*pb.Transfer, error) {
	asked := proto.Clone(request).(*pb.PullBlocksRequest)
	return c.ended(ctx, &asked.Wait, timeout, func(ctx context.Context) (*pb.Transfer, bool, error) {
		reply, err := c.Handoff.PullBlocks(ctx, asked)
		return reply.GetTransfer(), reply.GetConditionMet(), err
	})
}

// Receive is Pull for a push: it reserves blocks for what request.Source will send, and waits for the push.
func (c *Client) Receive(
	ctx context.Context, request *pb.ReserveBlocksRequest, timeout time.Duration,
) (*pb.Transfer, error) {
	asked := proto.Clone(request).(*pb.ReserveBlocksRequest)
	return c.ended(ctx, &asked.Wait, timeout, func(ctx context.Context) (*pb.Transfer, bool, error) {
		reply, err := c.Handoff.ReserveBlocks(ctx, asked)
		return reply.GetTransfer(), reply.GetConditionMet(), err
	})
}

func (c *Client) ended(
	ctx context.Context, wait **pb.TransferWait, timeout time.Duration,
	begin func(context.Context) (*pb.Transfer, bool, error),
) (*pb.Transfer, error) {
	if timeout <= 0 {
		timeout = defaultMove
	}
	over := time.Now().Add(timeout)
	until := (*wait).GetUntil()
	*wait = &pb.TransferWait{Until: until, Timeout: durationpb.New(min(timeout, waitOnce))}
	transfer, met, err := begin(ctx)
	if err == nil && !met {
		var reply *pb.WaitTransferResponse
		reply, err = c.Wait(ctx, transfer.GetTransferId(), until, max(time.Until(over), 0))
		if err == nil {
			transfer, met = reply.Transfer, reply.ConditionMet
		}
	}
	switch {
	case err != nil:
		return transfer, err
	case !met:
		phase := "return"
		if !IsOver(transfer) {
			phase = waitsFor(transfer)
		}
		return transfer, &Error{
			Code: codes.DeadlineExceeded, Reason: "DEADLINE", Message: "the transfer is not done in its time",
			Metadata: map[string]string{"transfer_id": transfer.GetTransferId(), "phase": phase},
		}
	}
	return transfer, TransferError(transfer)
}

// Moving configures a Move. The zero value is usable.
type Moving struct {
	// RequestID is the id of the LLM's request. It labels the transfer at both engines.
	RequestID string
	// Into are the blocks that the KV goes to. Nil means that Move allocates as many blocks at the destination as the
	// source has, group by group.
	Into *pb.Blocks
	// Timeout limits the whole move; 0 means 90 s.
	Timeout time.Duration
}

// Moved is where the KV is now.
type Moved struct {
	// Transfer is the RECEIVE at the destination.
	Transfer *pb.Transfer
	// Blocks are the destination's blocks. Blocks that Move allocated are freed with their AllocationId.
	Blocks *pb.Blocks
}

// Move copies the KV of a prompt from blocks of one engine to another engine, and waits until the KV is there. It
// allocates blocks at the destination, hands the source's blocks over for reading, and lets the destination pull. Both
// servers must manage their pools. The caller keeps the source's blocks and frees them with FreeBlocks.
//
// A move that fails leaves nothing behind: Move cancels it at both sides and frees what it allocated. The error is an
// *Error. The error of a failed transfer is the one that TransferError returns.
func Move(
	ctx context.Context, source, destination *Client, blocks *pb.Blocks, content *pb.Content, options Moving,
) (*Moved, error) {
	if options.Timeout <= 0 {
		options.Timeout = defaultMove
	}
	over, key := time.Now().Add(options.Timeout), NewTransferKey()
	into, allocated := options.Into, []string(nil)
	if into == nil {
		taken, err := destination.Pool.AllocateBlocks(ctx, &pb.AllocateBlocksRequest{
			GroupBlockCounts: countsOf(blocks), RequestId: options.RequestID, Label: "move",
		})
		if err != nil {
			return nil, err
		}
		into, allocated = taken.Blocks, []string{taken.Blocks.AllocationId}
	}
	transfer, err := moveInto(ctx, source, destination, key, into, options.RequestID, over, &pb.HandOver{
		Blocks: blocks, Content: content, Ttl: durationpb.New(options.Timeout),
	})
	if err != nil {
		CleanUp(ctx, "the move failed", Side{Client: source, TransferKey: key},
			Side{Client: destination, TransferKey: key, FreeAllocationIDs: allocated})
		return nil, err
	}
	return &Moved{transfer, into}, nil
}

func moveInto(
	ctx context.Context, source, destination *Client, key []byte, into *pb.Blocks, requestID string, over time.Time,
	job *pb.HandOver,
) (*pb.Transfer, error) {
	handedOver, err := source.Handoff.FinishedBlocks(ctx, &pb.FinishedBlocksRequest{
		TransferKey: key, RequestId: requestID, Job: &pb.FinishedBlocksRequest_ForReaders{ForReaders: job},
	})
	if err != nil {
		return nil, err
	}
	return destination.Pull(ctx, &pb.PullBlocksRequest{
		Pull:        &pb.PullBlocksRequest_Grant{Grant: handedOver.Grant},
		Content:     job.Content,
		Destination: &pb.PullDestination{Blocks: into},
		RequestId:   requestID,
	}, max(time.Until(over), time.Millisecond))
}

// countsOf returns the number of blocks of each group.
func countsOf(blocks *pb.Blocks) (counts []*pb.GroupBlockCount) {
	for _, group := range blocks.GetGroups() {
		row := &pb.GroupBlockCount{Group: group.Group}
		for _, count := range group.GetRuns().GetCounts() {
			row.BlockCount += count
		}
		counts = append(counts, row)
	}
	return counts
}

// waitsFor names what a transfer that is not over waits for, or its phase.
func waitsFor(transfer *pb.Transfer) string {
	if waiting := transfer.GetWaitingFor(); waiting != pb.WaitingFor_WAITING_FOR_UNSPECIFIED {
		return lowerName(waiting, "WAITING_FOR_")
	}
	if phases := transfer.GetPhases(); len(phases) > 0 {
		return phaseName(phases[len(phases)-1].Phase)
	}
	return "queue"
}

func phaseName(phase pb.TransferPhase) string { return lowerName(phase, "TRANSFER_PHASE_") }
