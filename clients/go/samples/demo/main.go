// Demo is a scheduler and router in one: it drives one pull between two kvgrpc servers.
//
//	kvgrpc serve --port 50051 &
//	kvgrpc serve --port 50052 &
//	go run ./samples/demo -prefill 127.0.0.1:50051 -decode 127.0.0.1:50052
//
// The story is in main.go, and the operator's view of it in print.go.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"log"
	"time"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func main() {
	log.SetFlags(0)
	prefill := flag.String("prefill", "127.0.0.1:50051", "`address` of the server that hands blocks over")
	decode := flag.String("decode", "127.0.0.1:50052", "`address` of the server that pulls them")
	blocks := flag.Uint("blocks", 32, "blocks to move")
	traceparent := flag.String("traceparent", newTraceparent(), "W3C `context` of the request's trace")
	timeout := flag.Duration("timeout", 2*time.Minute, "limit for all of it")
	flag.Parse()

	ctx, cancel := context.WithTimeout(context.Background(), *timeout)
	defer cancel()
	// Every call carries the trace context, so that the spans of both servers join the request's trace.
	ctx = kvgrpc.WithTraceparent(ctx, *traceparent)
	fmt.Println("trace    ", *traceparent)

	if err := run(ctx, *prefill, *decode, uint32(*blocks)); err != nil {
		log.Fatal("demo: ", err)
	}
}

// run connects the two engines and moves one request's KV between them.
func run(ctx context.Context, prefill, decode string, blocks uint32) error {
	p, err := kvgrpc.Connect(prefill, kvgrpc.Options{})
	if err != nil {
		return err
	}
	defer p.Close()
	d, err := kvgrpc.Connect(decode, kvgrpc.Options{})
	if err != nil {
		return err
	}
	defer d.Close()
	blockTokens, err := pair(ctx, p, d)
	if err != nil {
		return err
	}
	r := &request{p: p, d: d, key: kvgrpc.NewTransferKey()}
	err = r.pull(ctx, blocks, blocks*blockTokens)
	if err != nil {
		r.cleanUp(ctx, err)
		return err
	}
	return r.free(ctx)
}

// pair checks that the two can exchange blocks and lets them connect, so that the first transfer need not wait for
// that. It returns the number of tokens in a block.
func pair(ctx context.Context, p, d *kvgrpc.Client) (uint32, error) {
	source, err := p.Handshake.GetCapabilities(ctx, &pb.GetCapabilitiesRequest{})
	if err != nil {
		return 0, err
	}
	destination, err := d.Handshake.GetCapabilities(ctx, &pb.GetCapabilitiesRequest{})
	if err != nil {
		return 0, err
	}
	verdict, err := p.Handshake.CheckCompatibility(ctx, &pb.CheckCompatibilityRequest{Engine: destination.Engine})
	if err != nil {
		return 0, err
	}
	if !verdict.Compatible {
		return 0, fmt.Errorf("these engines cannot exchange blocks: %v", verdict.Differences)
	}
	connected, err := d.Handshake.ConnectPeer(ctx, &pb.ConnectPeerRequest{
		Peer: &pb.PeerAddress{Address: source.Engine.Address, EngineId: source.Engine.EngineId},
	})
	if err != nil {
		return 0, err
	}
	for _, path := range connected.Peer.Paths {
		fmt.Printf("paired    rank %d reads rank %d by %s: %s\n", path.Rank, path.PeerRank, path.DataPath, path.Why)
	}
	return source.Engine.Pool.Groups[0].BlockTokens, nil
}

// request is one LLM request as its router sees it.
type request struct {
	p, d           *kvgrpc.Client
	key            []byte
	source, target *pb.Blocks
}

// held is what the request has at one engine. Its blocks are nil where the request failed before it got any.
type held struct {
	by     *kvgrpc.Client
	blocks *pb.Blocks
}

func (r *request) held() []held { return []held{{r.p, r.source}, {r.d, r.target}} }

// pull moves the KV of a prompt from P to D.
func (r *request) pull(ctx context.Context, blocks, tokens uint32) (err error) {
	// P has computed a prompt and hands its blocks over: they are pinned under a lease, and P mints the grant to read
	// them.
	if r.source, err = allocate(ctx, r.p, blocks); err != nil {
		return err
	}
	content := kvgrpc.TokenContent(prompt(tokens))
	handedOver, err := r.p.Handoff.FinishedBlocks(ctx, &pb.FinishedBlocksRequest{
		TransferKey: r.key,
		RequestId:   "demo",
		Job:         &pb.FinishedBlocksRequest_ForReaders{ForReaders: &pb.HandOver{Blocks: r.source, Content: content}},
	})
	if err != nil {
		return err
	}
	fmt.Printf("finished  %s, a grant of %d bytes\n", handedOver.Lease.LeaseId, len(handedOver.Grant.Token))
	if err := whoPinsWhat(ctx, r.p, r.d); err != nil {
		return err
	}

	// The router relays the grant unread. D pulls with it and states the tokens.
	if r.target, err = allocate(ctx, r.d, blocks); err != nil {
		return err
	}
	pull, err := r.d.Handoff.PullBlocks(ctx, &pb.PullBlocksRequest{
		Pull:        &pb.PullBlocksRequest_Grant{Grant: handedOver.Grant},
		Content:     content,
		Destination: &pb.PullDestination{Blocks: r.target},
		TransferKey: r.key,
		RequestId:   "demo",
	})
	if err != nil {
		return err
	}
	received, err := follow(ctx, r.d, pull)
	if err != nil {
		return err
	}
	report(received)
	if !kvgrpc.Succeeded(received) {
		failure := received.Failure
		return fmt.Errorf("the pull ended as %v: %v, next %v", received.State, failure.GetReason(), kvgrpc.NextStep(failure))
	}

	// D has told P that its consumer is done. One look would suffice; the wait covers the last message between them.
	returned := pb.WaitCondition_WAIT_CONDITION_RETURNED
	if _, err := r.p.Wait(ctx, handedOver.Transfer.TransferId, returned, 5*time.Second); err != nil {
		return err
	}
	return whoPinsWhat(ctx, r.p, r.d)
}

// allocate takes blocks. Later calls get the whole message, because it names the engine's life and the allocation. If
// the engine restarts in between, a call with these blocks is refused and does not touch blocks of another request.
func allocate(ctx context.Context, client *kvgrpc.Client, blocks uint32) (*pb.Blocks, error) {
	reply, err := client.Pool.AllocateBlocks(ctx, &pb.AllocateBlocksRequest{
		GroupBlockCounts: []*pb.GroupBlockCount{{Group: 0, BlockCount: blocks}},
	})
	return reply.GetBlocks(), err
}

// follow watches a transfer, starting at the reply that made it, until it is over and its blocks are returned.
func follow(ctx context.Context, client *kvgrpc.Client, pull *pb.PullBlocksResponse) (*pb.Transfer, error) {
	transfer := pull.Transfer
	if kvgrpc.MayReuseMemory(transfer) {
		return transfer, nil
	}
	filter := &pb.TransferFilter{TransferIds: []string{transfer.TransferId}}
	for change, err := range client.Watch(ctx, filter, kvgrpc.PointOf(pull.Header)) {
		switch {
		case err != nil:
			return transfer, err
		case change.HistoryLost:
			now, err := client.Transfers.GetTransfer(ctx, &pb.GetTransferRequest{TransferId: transfer.TransferId})
			if err != nil {
				return transfer, err
			}
			transfer = now.Transfer
		case change.Transfer != nil:
			transfer = change.Transfer
			fmt.Printf("change    %d: %v, memory %v, %v\n",
				transfer.EventSeq, transfer.State, transfer.Memory, transfer.WaitingFor)
		}
		if kvgrpc.MayReuseMemory(transfer) {
			break
		}
	}
	return transfer, nil
}

// free gives blocks back. Pinned blocks become free at their last unpin.
func (r *request) free(ctx context.Context) error {
	var failed []error
	for _, held := range r.held() {
		freed, err := held.by.Pool.FreeBlocks(ctx, &pb.FreeBlocksRequest{
			Freed: &pb.FreeBlocksRequest_AllocationId{AllocationId: held.blocks.AllocationId},
		})
		if err != nil {
			failed = append(failed, err)
			continue
		}
		fmt.Printf("freed     %d blocks of %s\n", kvgrpc.BlockCount(freed.FreedBlocks), freed.Header.EngineId)
	}
	return errors.Join(failed...)
}

// cleanUp ends what a failed request has left, with one call at each side.
func (r *request) cleanUp(ctx context.Context, why error) {
	var sides []kvgrpc.Side
	for _, held := range r.held() {
		side := kvgrpc.Side{Client: held.by, TransferKey: r.key}
		if held.blocks != nil {
			side.FreeAllocationIDs = []string{held.blocks.AllocationId}
		}
		sides = append(sides, side)
	}
	for _, result := range kvgrpc.CleanUp(ctx, why.Error(), sides...) {
		if result.Err != nil {
			log.Print("clean up: ", result.Err)
			continue
		}
		fmt.Printf("cancelled at %s: %v\n", result.Response.Header.EngineId, kvgrpc.Outcome(result.Response))
	}
}

// prompt makes up token ids.
func prompt(tokens uint32) []uint32 {
	ids := make([]uint32, tokens)
	for i := range ids {
		ids[i] = uint32(i) % 32_000
	}
	return ids
}

func newTraceparent() string {
	random := make([]byte, 24)
	rand.Read(random) // never fails: the runtime ends the program first
	return fmt.Sprintf("00-%x-%x-01", random[:16], random[16:])
}
