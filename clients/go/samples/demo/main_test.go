package main

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// engine plays the part of a server, as far as the demo needs one.
type engine struct {
	pb.UnimplementedAdminServiceServer
	pb.UnimplementedHandoffServiceServer
	pb.UnimplementedHandshakeServiceServer
	pb.UnimplementedLeaseServiceServer
	pb.UnimplementedPoolServiceServer
	pb.UnimplementedTransferServiceServer

	name    string
	address string
	end     pb.TransferState // the state that the pull ends in

	mu    sync.Mutex
	asked []string
}

func start(t *testing.T, name string, end pb.TransferState) *engine {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{name: name, address: listener.Addr().String(), end: end}
	server := grpc.NewServer()
	pb.RegisterAdminServiceServer(server, e)
	pb.RegisterHandoffServiceServer(server, e)
	pb.RegisterHandshakeServiceServer(server, e)
	pb.RegisterLeaseServiceServer(server, e)
	pb.RegisterPoolServiceServer(server, e)
	pb.RegisterTransferServiceServer(server, e)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return e
}

func (e *engine) note(what string, arguments ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked = append(e.asked, fmt.Sprintf(what, arguments...))
}

func (e *engine) header() *pb.ResponseHeader {
	return &pb.ResponseHeader{EngineId: e.name, Incarnation: 7, EventSeq: 1}
}

func (e *engine) blocks(count uint32) *pb.Blocks {
	runs := &pb.BlockRuns{Starts: []uint32{0}, Counts: []uint32{count}}
	return &pb.Blocks{Incarnation: 7, AllocationId: e.name + "-blocks", Groups: []*pb.GroupBlocks{{Runs: runs}}}
}

func (e *engine) GetCapabilities(context.Context, *pb.GetCapabilitiesRequest) (*pb.GetCapabilitiesResponse, error) {
	return &pb.GetCapabilitiesResponse{Header: e.header(), Engine: &pb.EngineDescription{
		EngineId: e.name, Address: e.address, Pool: &pb.PoolDescription{Groups: []*pb.Group{{BlockTokens: 16}}},
	}}, nil
}

func (e *engine) CheckCompatibility(context.Context, *pb.CheckCompatibilityRequest) (*pb.CheckCompatibilityResponse, error) {
	return &pb.CheckCompatibilityResponse{Header: e.header(), Compatible: true}, nil
}

func (e *engine) ConnectPeer(_ context.Context, r *pb.ConnectPeerRequest) (*pb.ConnectPeerResponse, error) {
	e.note("connect %s", r.Peer.EngineId)
	return &pb.ConnectPeerResponse{Header: e.header(), Peer: &pb.Peer{}}, nil
}

func (e *engine) AllocateBlocks(_ context.Context, r *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
	return &pb.AllocateBlocksResponse{Header: e.header(), Blocks: e.blocks(r.GroupBlockCounts[0].BlockCount)}, nil
}

func (e *engine) FreeBlocks(_ context.Context, r *pb.FreeBlocksRequest) (*pb.FreeBlocksResponse, error) {
	e.note("free %s", r.GetAllocationId())
	return &pb.FreeBlocksResponse{Header: e.header()}, nil
}

func (e *engine) FinishedBlocks(_ context.Context, r *pb.FinishedBlocksRequest) (*pb.FinishedBlocksResponse, error) {
	e.note("finished %s, %d tokens", r.GetForReaders().Blocks.AllocationId, len(r.GetForReaders().Content.GetTokens().TokenIds))
	return &pb.FinishedBlocksResponse{
		Header: e.header(), Lease: &pb.Lease{LeaseId: "lease"}, Transfer: &pb.Transfer{TransferId: "send"},
		Grant: &pb.Grant{Token: []byte("token")},
	}, nil
}

func (e *engine) PullBlocks(_ context.Context, r *pb.PullBlocksRequest) (*pb.PullBlocksResponse, error) {
	e.note("pull %s into %s", r.GetGrant().Token, r.Destination.Blocks.AllocationId)
	return &pb.PullBlocksResponse{Header: e.header(), Transfer: &pb.Transfer{TransferId: "receive"}}, nil
}

func (e *engine) WatchTransfers(r *pb.WatchTransfersRequest, stream grpc.ServerStreamingServer[pb.WatchTransfersResponse]) error {
	e.note("watch %v after %d", r.Filter.TransferIds, r.AfterEventSeq)
	stream.Send(&pb.WatchTransfersResponse{Header: e.header(), Transfer: &pb.Transfer{
		TransferId: "receive", State: e.end, Memory: pb.MemoryDisposition_MEMORY_DISPOSITION_RETURNED,
	}})
	<-stream.Context().Done()
	return nil
}

func (e *engine) WaitTransfer(context.Context, *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
	return &pb.WaitTransferResponse{Header: e.header(), ConditionMet: true}, nil
}

func (e *engine) CancelTransfer(_ context.Context, r *pb.CancelTransferRequest) (*pb.CancelTransferResponse, error) {
	e.note("cancel with a key of %d bytes, free %v", len(r.GetTransferKey()), r.FreeAllocationIds)
	return &pb.CancelTransferResponse{Header: e.header()}, nil
}

func (e *engine) ListPins(context.Context, *pb.ListPinsRequest) (*pb.ListPinsResponse, error) {
	return &pb.ListPinsResponse{Header: e.header()}, nil
}

func (e *engine) ListLeases(context.Context, *pb.ListLeasesRequest) (*pb.ListLeasesResponse, error) {
	return &pb.ListLeasesResponse{Header: e.header()}, nil
}

func (e *engine) wasAsked(t *testing.T, want ...string) {
	t.Helper()
	if fmt.Sprint(e.asked) != fmt.Sprint(want) {
		t.Errorf("%s: %q, want %q", e.name, e.asked, want)
	}
}

func TestAPullGoesFromTheSourcesBlocksToTheDestinationsAndFreesBoth(t *testing.T) {
	p := start(t, "P", pb.TransferState_TRANSFER_STATE_SUCCEEDED)
	d := start(t, "D", pb.TransferState_TRANSFER_STATE_SUCCEEDED)
	if err := run(t.Context(), p.address, d.address, 4); err != nil {
		t.Fatal(err)
	}
	p.wasAsked(t, "finished P-blocks, 64 tokens", "free P-blocks")
	d.wasAsked(t, "connect P", "pull token into D-blocks", "watch [receive] after 1", "free D-blocks")
}

func TestAPullThatFailsIsCleanedUpAtBothSides(t *testing.T) {
	p := start(t, "P", pb.TransferState_TRANSFER_STATE_FAILED)
	d := start(t, "D", pb.TransferState_TRANSFER_STATE_FAILED)
	if err := run(t.Context(), p.address, d.address, 4); err == nil {
		t.Fatal("a pull that failed is no error")
	}
	p.wasAsked(t, "finished P-blocks, 64 tokens", "cancel with a key of 16 bytes, free [P-blocks]")
	d.wasAsked(t, "connect P", "pull token into D-blocks", "watch [receive] after 1",
		"cancel with a key of 16 bytes, free [D-blocks]")
}
