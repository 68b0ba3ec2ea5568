package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// blockTokens is the block size of every fake pool, in tokens.
const blockTokens = 4

// world is what leads find out from each other.
type world struct {
	mu    sync.Mutex
	leads map[string]*lead // by address
	// leases are, by transfer key, the leads that have the KV. For a push, "to " and the key give the destination as
	// well.
	leases map[string]*lead
}

// lead is a fake lead. Its state is what a router can see of a lead.
type lead struct {
	pb.UnimplementedHandshakeServiceServer
	pb.UnimplementedPoolServiceServer
	pb.UnimplementedHandoffServiceServer
	pb.UnimplementedTransferServiceServer

	world   *world
	address string
	grpc    *grpc.Server

	mu          sync.Mutex
	changed     chan struct{} // closed at each change, and then replaced
	incarnation uint64
	admission   pb.Admission
	free, queue uint32
	allocations map[string]bool
	transfers   []*pb.Transfer
	keys        map[string][]byte // of transfers
	tombstones  map[string]bool   // of cancelled keys; guarded by the world's lock
	cancelled   [][]byte
	calls       []string
	traces      []string
	// refusals are the errors of a method's next calls, the first one first.
	refusals map[string][]error
	// fails are the failures of the next transfers to this lead, the first one first.
	fails []*pb.Failure
	// lists makes ListTransfers wait until it is closed.
	lists chan struct{}
	// holds stops the progress of transfers to this lead.
	holds bool
}

func newWorld() *world { return &world{leads: map[string]*lead{}, leases: map[string]*lead{}} }

// newLead starts a lead at a real socket.
func (w *world) newLead(t *testing.T) *lead {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &lead{
		world: w, address: listener.Addr().String(), changed: make(chan struct{}), incarnation: 7,
		admission: pb.Admission_ADMISSION_OPEN, free: 64, allocations: map[string]bool{}, keys: map[string][]byte{},
		tombstones: map[string]bool{}, refusals: map[string][]error{},
	}
	l.grpc = grpc.NewServer(grpc.UnaryInterceptor(l.intercept))
	pb.RegisterHandshakeServiceServer(l.grpc, l)
	pb.RegisterPoolServiceServer(l.grpc, l)
	pb.RegisterHandoffServiceServer(l.grpc, l)
	pb.RegisterTransferServiceServer(l.grpc, l)
	go l.grpc.Serve(listener)
	t.Cleanup(l.grpc.Stop)
	w.leads[l.address] = l
	return l
}

// intercept records each call and its trace, and refuses the call where the test says so.
func (l *lead) intercept(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	method := info.FullMethod[1+bytes.LastIndexByte([]byte(info.FullMethod), '/'):]
	l.mu.Lock()
	l.calls = append(l.calls, method)
	stated, _ := metadata.FromIncomingContext(ctx)
	l.traces = append(l.traces, stated.Get("traceparent")...)
	var refusal error
	if left := l.refusals[method]; len(left) > 0 {
		refusal, l.refusals[method] = left[0], left[1:]
	}
	l.mu.Unlock()
	if refusal != nil {
		return nil, refusal
	}
	return handle(ctx, request)
}

// set changes a lead, and wakes everything that waits for it.
func (l *lead) set(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *lead) header() *pb.ResponseHeader {
	return &pb.ResponseHeader{EngineId: "engine " + l.address, Incarnation: l.incarnation}
}

func (l *lead) called(method string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	count := 0
	for _, name := range l.calls {
		if name == method {
			count++
		}
	}
	return count
}

// holding returns what is left at a lead: allocations, leases, and transfers that are not over.
func (l *lead) holding() (left []string) {
	l.mu.Lock()
	for id := range l.allocations {
		left = append(left, id)
	}
	for _, transfer := range l.transfers {
		if transfer.State <= pb.TransferState_TRANSFER_STATE_ACTIVE {
			left = append(left, transfer.TransferId)
		}
	}
	l.mu.Unlock()
	l.world.mu.Lock()
	defer l.world.mu.Unlock()
	for _, of := range l.world.leases {
		if of == l {
			left = append(left, "a lease")
		}
	}
	return left
}

func (l *lead) WatchEngine(
	_ *pb.WatchEngineRequest, stream grpc.ServerStreamingServer[pb.WatchEngineResponse],
) error {
	for {
		l.mu.Lock()
		changed := l.changed
		response := &pb.WatchEngineResponse{Header: l.header(), Status: &pb.EngineStatus{
			Admission: l.admission, EngineAttached: true, WaitingTurnCount: l.queue,
			Groups: []*pb.GroupLoad{{BlockCount: 64, FreeBlockCount: l.free}},
		}}
		l.mu.Unlock()
		if err := stream.Send(response); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		}
	}
}

func (l *lead) DescribePools(context.Context, *pb.DescribePoolsRequest) (*pb.DescribePoolsResponse, error) {
	return &pb.DescribePoolsResponse{Header: l.header(), Pools: []*pb.PoolDescription{{Groups: []*pb.Group{{
		Kind: pb.GroupKind_GROUP_KIND_FULL_ATTENTION, BlockTokens: blockTokens, BlockCount: 64,
	}}}}}, nil
}

func (l *lead) AllocateBlocks(_ context.Context, r *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	id := fmt.Sprintf("allocation %d", len(l.calls))
	l.allocations[id] = true
	// The blocks are two runs, not in ascending order, because nothing may rely on an order.
	count := r.GroupBlockCounts[0].BlockCount
	runs := &pb.BlockRuns{Starts: []uint32{40, 3}, Counts: []uint32{1, count - 1}}
	if count == 1 {
		runs = &pb.BlockRuns{Starts: []uint32{40}, Counts: []uint32{1}}
	}
	return &pb.AllocateBlocksResponse{Header: l.header(), Blocks: &pb.Blocks{
		Incarnation: l.incarnation, AllocationId: id, Groups: []*pb.GroupBlocks{{Runs: runs}},
	}}, nil
}

func (l *lead) FreeBlocks(_ context.Context, r *pb.FreeBlocksRequest) (*pb.FreeBlocksResponse, error) {
	l.set(func() { delete(l.allocations, r.GetAllocationId()) })
	return &pb.FreeBlocksResponse{Header: l.header()}, nil
}

// refusesKey reports that a key was cancelled here. The caller holds the world's lock.
func (l *lead) refusesKey(key []byte) error {
	if l.tombstones[string(key)] {
		return refusal(codes.FailedPrecondition, "CANCELLED", "RECOMPUTE")
	}
	return nil
}

func (l *lead) FinishedBlocks(_ context.Context, r *pb.FinishedBlocksRequest) (*pb.FinishedBlocksResponse, error) {
	l.world.mu.Lock()
	err := l.refusesKey(r.TransferKey)
	if err == nil {
		l.world.leases[string(r.TransferKey)] = l
	}
	l.world.mu.Unlock()
	if r.GetPart() != nil {
		l.world.meet(r.TransferKey)
	}
	return &pb.FinishedBlocksResponse{Header: l.header(), Grant: &pb.Grant{Token: r.TransferKey}}, err
}

// meet ends a push once both of its halves are there.
func (w *world) meet(key []byte) {
	w.mu.Lock()
	destination, source := w.leases["to "+string(key)], w.leases[string(key)]
	w.mu.Unlock()
	if source != nil && destination != nil {
		destination.end(key)
	}
}

func (l *lead) PullBlocks(_ context.Context, r *pb.PullBlocksRequest) (*pb.PullBlocksResponse, error) {
	if !bytes.Equal(r.GetGrant().GetToken(), r.TransferKey) {
		return nil, refusal(codes.PermissionDenied, "TRANSFER_KEY_MISMATCH", "FIX_REQUEST")
	}
	transfer, err := l.receive(r.RequestId, r.TransferKey)
	if err == nil && !l.stuck() {
		l.end(r.TransferKey)
	}
	return &pb.PullBlocksResponse{Header: l.header(), Transfer: transfer}, err
}

func (l *lead) ReserveBlocks(_ context.Context, r *pb.ReserveBlocksRequest) (*pb.ReserveBlocksResponse, error) {
	transfer, err := l.receive(r.RequestId, r.TransferKey)
	return &pb.ReserveBlocksResponse{Header: l.header(), Transfer: transfer, Grant: &pb.Grant{
		Token: r.TransferKey, Address: l.address,
	}}, err
}

func (l *lead) RegisterPush(_ context.Context, r *pb.RegisterPushRequest) (*pb.RegisterPushResponse, error) {
	l.world.mu.Lock()
	err := l.refusesKey(r.Grant.Token)
	if err == nil {
		l.world.leases["to "+string(r.Grant.Token)] = l.world.leads[r.Grant.Address]
	}
	l.world.mu.Unlock()
	l.world.meet(r.Grant.Token)
	return &pb.RegisterPushResponse{Header: l.header()}, err
}

func (l *lead) stuck() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holds
}

// receive makes a transfer to this lead.
func (l *lead) receive(label string, key []byte) (*pb.Transfer, error) {
	l.world.mu.Lock()
	defer l.world.mu.Unlock()
	if err := l.refusesKey(key); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	transfer := &pb.Transfer{
		TransferId: fmt.Sprintf("transfer %d", len(l.calls)), RequestId: label,
		Direction: pb.Direction_DIRECTION_RECEIVE, State: pb.TransferState_TRANSFER_STATE_ACTIVE,
	}
	l.transfers = append(l.transfers, transfer)
	l.keys[transfer.TransferId] = key
	return transfer, nil
}

// end ends a transfer to this lead: as the test says, or with success where the source has the KV.
func (l *lead) end(key []byte) {
	var failure *pb.Failure
	l.mu.Lock()
	if len(l.fails) > 0 {
		failure, l.fails = l.fails[0], l.fails[1:]
	}
	l.mu.Unlock()
	l.world.mu.Lock()
	if l.world.leases[string(key)] == nil {
		failure = lost
	} else if failure == nil {
		delete(l.world.leases, string(key)) // its consumer is done
	}
	delete(l.world.leases, "to "+string(key))
	l.world.mu.Unlock()
	l.over(key, failure)
}

func (l *lead) over(key []byte, failure *pb.Failure) {
	l.set(func() {
		for i, transfer := range l.transfers {
			if transfer.State != pb.TransferState_TRANSFER_STATE_ACTIVE || !bytes.Equal(l.keys[transfer.TransferId], key) {
				continue
			}
			state := pb.TransferState_TRANSFER_STATE_SUCCEEDED
			if failure != nil {
				state = pb.TransferState_TRANSFER_STATE_FAILED
			}
			if failure.GetReason() == pb.FailureReason_FAILURE_REASON_CANCELLED {
				state = pb.TransferState_TRANSFER_STATE_CANCELLED
			}
			l.transfers[i] = &pb.Transfer{
				TransferId: transfer.TransferId, RequestId: transfer.RequestId, Direction: transfer.Direction,
				State: state, Failure: failure,
			}
		}
	})
}

func (l *lead) WaitTransfer(ctx context.Context, r *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
	for {
		l.mu.Lock()
		changed := l.changed
		at := slices.IndexFunc(l.transfers, func(t *pb.Transfer) bool { return t.TransferId == r.TransferId })
		transfer := l.transfers[at]
		l.mu.Unlock()
		if transfer.State > pb.TransferState_TRANSFER_STATE_ACTIVE {
			return &pb.WaitTransferResponse{Header: l.header(), Transfer: transfer, ConditionMet: true}, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-changed:
		}
	}
}

func (l *lead) ListTransfers(ctx context.Context, r *pb.ListTransfersRequest) (*pb.ListTransfersResponse, error) {
	if l.lists != nil {
		select {
		case <-l.lists:
		case <-ctx.Done():
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	reply := &pb.ListTransfersResponse{Header: l.header()}
	for _, transfer := range slices.Backward(l.transfers) {
		if transfer.RequestId == r.Filter.RequestId {
			reply.Transfers = append(reply.Transfers, transfer)
		}
	}
	return reply, nil
}

func (l *lead) CancelTransfer(_ context.Context, r *pb.CancelTransferRequest) (*pb.CancelTransferResponse, error) {
	key := r.GetTransferKey()
	l.world.mu.Lock()
	l.tombstones[string(key)] = true
	delete(l.world.leases, string(key))
	delete(l.world.leases, "to "+string(key))
	l.world.mu.Unlock()
	l.over(key, &pb.Failure{Reason: pb.FailureReason_FAILURE_REASON_CANCELLED, Message: r.Message, Next: recompute})
	l.set(func() {
		l.cancelled = append(l.cancelled, key)
		for _, id := range r.FreeAllocationIds {
			delete(l.allocations, id)
		}
	})
	return &pb.CancelTransferResponse{Header: l.header()}, nil
}

var lost = &pb.Failure{Reason: pb.FailureReason_FAILURE_REASON_LEASE_EXPIRED, Next: recompute, Message: "too late"}

// refusal returns a status as a lead makes it.
func refusal(code codes.Code, reason, next string, more ...protoadapt.MessageV1) error {
	info := &errdetails.ErrorInfo{Reason: reason, Domain: "kvgrpc.dev", Metadata: map[string]string{"next": next}}
	made, err := status.New(code, "no: "+reason).WithDetails(append([]protoadapt.MessageV1{info}, more...)...)
	if err != nil {
		panic(err)
	}
	return made.Err()
}

// comeBack returns a refusal with a delay.
func comeBack(after time.Duration) error {
	return refusal(codes.ResourceExhausted, "POOL_EXHAUSTED", "RETRY_HERE",
		&errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
}
