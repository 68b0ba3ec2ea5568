// Demo is a scheduler and router in one: it drives one pull between two kvgrpc servers.
//
//	kvgrpc serve --port 50051 &
//	kvgrpc serve --port 50052 &
//	go run ./samples/demo -prefill 127.0.0.1:50051 -decode 127.0.0.1:50052
//
// It uses the generated code and nothing else: what a message means stands in the comments of the schema.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func main() {
	log.SetFlags(0)
	prefill := flag.String("prefill", "127.0.0.1:50051", "`address` of the server that hands blocks over")
	decode := flag.String("decode", "127.0.0.1:50052", "`address` of the server that pulls them")
	blocks := flag.Uint("blocks", 32, "blocks to move")
	traceparent := flag.String("traceparent", "00-"+randomHex(16)+"-"+randomHex(8)+"-01", "W3C `context` of the request's trace")
	timeout := flag.Duration("timeout", 2*time.Minute, "limit for all of it")
	flag.Parse()

	ctx, cancel := context.WithTimeout(context.Background(), *timeout)
	defer cancel()
	// Every call carries the trace context, so that the spans of both servers join the request's trace.
	ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", *traceparent)
	fmt.Println("trace    ", *traceparent)

	if err := run(ctx, *prefill, *decode, uint32(*blocks)); err != nil {
		log.Fatal("demo: ", explain(err))
	}
}

// run is the life of one request, as its router sees it.
func run(ctx context.Context, prefill, decode string, blocks uint32) error {
	p, err := dial("prefill", prefill)
	if err != nil {
		return err
	}
	defer p.conn.Close()
	d, err := dial("decode", decode)
	if err != nil {
		return err
	}
	defer d.conn.Close()
	blockTokens, err := pair(ctx, p, d)
	if err != nil {
		return err
	}

	// P has computed a prompt. Its blocks are handed over: pinned under a lease, and P mints the grant to read them.
	source, err := p.allocate(ctx, blocks)
	if err != nil {
		return err
	}
	defer p.free(ctx, source)
	content := &pb.Content{Form: &pb.Content_Tokens{Tokens: &pb.TokenContent{TokenIds: prompt(blocks * blockTokens)}}}
	handedOver, err := call(ctx, p.handoff.FinishedBlocks, &pb.FinishedBlocksRequest{
		IdempotencyKey: randomHex(16),
		TransferKey:    randomBytes(16),
		RequestId:      "demo",
		Blocks:         source.Blocks,
		Content:        content,
		Last:           true,
		Incarnation:    source.Header.Incarnation,
	})
	if err != nil {
		return err
	}
	fmt.Printf("finished  %s, a grant of %d bytes\n", handedOver.Lease.LeaseId, len(handedOver.Grant.Token))
	if err := whoPinsWhat(ctx, p, d); err != nil {
		return err
	}

	// The router relays the grant, unread. D pulls with it, and says for which tokens.
	target, err := d.allocate(ctx, blocks)
	if err != nil {
		return err
	}
	defer d.free(ctx, target)
	pull, err := call(ctx, d.handoff.PullBlocks, &pb.PullBlocksRequest{
		IdempotencyKey: randomHex(16),
		RequestId:      "demo",
		Pull:           &pb.PullBlocksRequest_Grant{Grant: handedOver.Grant},
		Content:        content,
		Destination:    &pb.PullDestination{Blocks: target.Blocks, Incarnation: target.Header.Incarnation},
	})
	if err != nil {
		return err
	}
	received, err := d.follow(ctx, pull.Header.Incarnation, pull.Transfer)
	if err != nil {
		return err
	}
	report(received)
	if received.State != pb.TransferState_TRANSFER_STATE_SUCCEEDED {
		return fmt.Errorf("the pull ended as %v: %v", received.State, received.Failure)
	}

	// P has learnt from D that its consumer is done. One look would do; the wait is for the last message between them.
	if _, err := call(ctx, p.transfers.WaitTransfer, &pb.WaitTransferRequest{
		TransferId: handedOver.Transfer.TransferId,
		Until:      pb.WaitCondition_WAIT_CONDITION_RETURNED,
		Timeout:    durationpb.New(callTimeout / 2),
	}); err != nil {
		return err
	}
	return whoPinsWhat(ctx, p, d)
}

// pair finds out whether the two can exchange blocks and lets them connect, so that the first transfer does not pay
// for it. It returns the tokens of a block.
func pair(ctx context.Context, p, d *engine) (uint32, error) {
	source, err := call(ctx, p.handshake.GetCapabilities, &pb.GetCapabilitiesRequest{})
	if err != nil {
		return 0, err
	}
	destination, err := call(ctx, d.handshake.GetCapabilities, &pb.GetCapabilitiesRequest{})
	if err != nil {
		return 0, err
	}
	verdict, err := call(ctx, p.handshake.CheckCompatibility, &pb.CheckCompatibilityRequest{Engine: destination.Engine})
	if err != nil {
		return 0, err
	}
	if !verdict.Compatible {
		return 0, fmt.Errorf("these engines cannot exchange blocks: %v", verdict.Differences)
	}
	connected, err := call(ctx, d.handshake.ConnectPeer, &pb.ConnectPeerRequest{
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
