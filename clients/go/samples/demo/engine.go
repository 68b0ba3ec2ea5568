package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

const (
	callTimeout   = 10 * time.Second // of one call, retries included
	streamTimeout = time.Minute      // of one watch; the next goes on where it ended
)

// engine is one server, with the services that the demo uses.
type engine struct {
	name      string
	conn      *grpc.ClientConn
	admin     pb.AdminServiceClient
	handoff   pb.HandoffServiceClient
	handshake pb.HandshakeServiceClient
	leases    pb.LeaseServiceClient
	pool      pb.PoolServiceClient
	transfers pb.TransferServiceClient
}

// dial connects at the first call. The service config retries UNAVAILABLE and nothing else.
func dial(name, address string) (*engine, error) {
	conn, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(kvgrpc.ServiceConfig))
	if err != nil {
		return nil, err
	}
	return &engine{
		name:      name,
		conn:      conn,
		admin:     pb.NewAdminServiceClient(conn),
		handoff:   pb.NewHandoffServiceClient(conn),
		handshake: pb.NewHandshakeServiceClient(conn),
		leases:    pb.NewLeaseServiceClient(conn),
		pool:      pb.NewPoolServiceClient(conn),
		transfers: pb.NewTransferServiceClient(conn),
	}, nil
}

// call makes a unary call with a deadline.
func call[Request, Response any](
	ctx context.Context,
	method func(context.Context, *Request, ...grpc.CallOption) (*Response, error),
	request *Request,
) (*Response, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return method(ctx, request)
}

// allocate takes blocks. Who names them later says of which life of the engine they are: header.incarnation. Should the
// engine restart meanwhile, the call is refused, instead of touching blocks that are another request's by then.
func (e *engine) allocate(ctx context.Context, blocks uint32) (*pb.AllocateBlocksResponse, error) {
	return call(ctx, e.pool.AllocateBlocks, &pb.AllocateBlocksRequest{
		IdempotencyKey: randomHex(16),
		Counts:         []*pb.GroupCount{{Group: 0, Count: blocks}},
	})
}

// free gives blocks back. Those that something still pins come free at their last unpin.
func (e *engine) free(ctx context.Context, taken *pb.AllocateBlocksResponse) {
	freed, err := call(ctx, e.pool.FreeBlocks, &pb.FreeBlocksRequest{
		IdempotencyKey: randomHex(16),
		Blocks:         taken.Blocks,
		Incarnation:    taken.Header.Incarnation,
	})
	if err != nil {
		log.Printf("%s: free: %s", e.name, explain(err))
		return
	}
	fmt.Printf("freed     %d blocks of %s\n", count(freed.Freed), e.name)
}

// follow watches a transfer until it is over and its blocks are returned. A watch that breaks is resumed after the
// last message that was seen, so that no change is missed.
func (e *engine) follow(ctx context.Context, incarnation uint64, transfer *pb.Transfer) (*pb.Transfer, error) {
	pause := 100 * time.Millisecond
	after := transfer.EventSeq
	for {
		var err error
		if transfer, err = e.watch(ctx, incarnation, &after, transfer); err == nil {
			return transfer, nil
		}
		switch code := status.Code(err); {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, io.EOF), code == codes.Unavailable, code == codes.ResourceExhausted, code == codes.DeadlineExceeded:
			log.Printf("%s: the watch is resumed: %s", e.name, explain(err))
		default:
			return nil, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
			pause = min(2*pause, 5*time.Second)
		}
	}
}

// watch returns the transfer as it was seen last, with an error if that is not its end. It moves after on with every
// message, also with those that only tell how far the server is.
func (e *engine) watch(ctx context.Context, incarnation uint64, after *uint64, transfer *pb.Transfer) (*pb.Transfer, error) {
	ctx, cancel := context.WithTimeout(ctx, streamTimeout)
	defer cancel()
	changes, err := e.transfers.WatchTransfers(ctx, &pb.WatchTransfersRequest{
		Filter:        &pb.TransferFilter{RequestId: transfer.RequestId},
		AfterEventSeq: *after,
		Incarnation:   incarnation,
	})
	if err != nil {
		return transfer, err
	}
	for transfer.Memory != pb.MemoryDisposition_MEMORY_DISPOSITION_RETURNED {
		change, err := changes.Recv()
		if err != nil {
			return transfer, err
		}
		if change.HistoryLost {
			now, err := call(ctx, e.transfers.GetTransfer, &pb.GetTransferRequest{TransferId: transfer.TransferId})
			if err != nil {
				return transfer, err
			}
			transfer = now.Transfer
		} else if change.Transfer.GetTransferId() == transfer.TransferId {
			transfer = change.Transfer
			fmt.Printf("change    %d: %v, memory %v %s\n", transfer.EventSeq, transfer.State, transfer.Memory, transfer.WaitingFor)
		}
		*after = change.GetHeader().GetEventSeq()
	}
	return transfer, nil
}

// report prints what an operator wants to know of a transfer that is over.
func report(transfer *pb.Transfer) {
	fmt.Printf("transfer  %s %v: %d blocks, %d bytes, %d tokens in %v\n", transfer.TransferId, transfer.State,
		transfer.Blocks, transfer.BytesDone, transfer.UseTokens, transfer.Age.AsDuration())
	for _, path := range transfer.Paths {
		fmt.Printf("  path    %s, rank %d from rank %d: %d bytes in %d descriptors\n",
			path.DataPath, path.Rank, path.PeerRank, path.Bytes, path.Descriptors)
	}
	for _, phase := range transfer.Phases {
		fmt.Printf("  phase   %-10s %v\n", phase.Name, phase.Duration.AsDuration())
	}
}

// whoPinsWhat prints the first page of pins and leases of each engine.
func whoPinsWhat(ctx context.Context, engines ...*engine) error {
	for _, e := range engines {
		pins, err := call(ctx, e.admin.ListPins, &pb.ListPinsRequest{})
		if err != nil {
			return err
		}
		leases, err := call(ctx, e.leases.ListLeases, &pb.ListLeasesRequest{})
		if err != nil {
			return err
		}
		fmt.Printf("pins      %s: %d pins, %d leases\n", e.name, len(pins.Pins), len(leases.Leases))
		for _, pin := range pins.Pins {
			fmt.Printf("  pin     %v of %d blocks by %s for %q\n", pin.Kind, count(pin.Blocks), pin.Owner, pin.RequestId)
		}
		for _, lease := range leases.Leases {
			fmt.Printf("  lease   %s, %v left, %d of %d consumers done\n",
				lease.LeaseId, lease.Remaining.AsDuration(), lease.ConsumersDone, lease.Consumers)
		}
	}
	return nil
}

// explain adds the reason, which is for programs, to the sentence, which is for readers.
func explain(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return fmt.Sprintf("%v [%s]", err, info.Reason)
		}
	}
	return err.Error()
}

func count(groups []*pb.GroupBlocks) (blocks uint32) {
	for _, group := range groups {
		for _, run := range group.Blocks.Counts {
			blocks += run
		}
	}
	return blocks
}

// prompt makes up token ids.
func prompt(tokens uint32) []uint32 {
	ids := make([]uint32, tokens)
	for i := range ids {
		ids[i] = uint32(i) % 32_000
	}
	return ids
}

func randomBytes(n int) []byte {
	bytes := make([]byte, n)
	rand.Read(bytes) // never fails: the program ends before it would
	return bytes
}

func randomHex(n int) string { return hex.EncodeToString(randomBytes(n)) }
