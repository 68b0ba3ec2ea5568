package main

import (
	"context"
	"math"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// allocationTTL bounds how long allocations outlive a router that dies. A living router renews them.
const allocationTTL = time.Minute

// driven is an engine that only computes. The router takes blocks from the engine's lead and names the blocks to
// compute into. It then hands the blocks over or has them filled.
type driven struct {
	*engine
	mu   sync.Mutex
	pool *pool
}

func (d *driven) prefill(ctx context.Context, a *attempt) (*handOver, error) {
	blocks, content, err := d.computePrompt(ctx, a)
	if err != nil {
		return nil, err
	}
	given, err := d.client.Handoff.FinishedBlocks(ctx, &pb.FinishedBlocksRequest{
		TransferKey: a.key,
		RequestId:   a.id,
		Job: &pb.FinishedBlocksRequest_ForReaders{ForReaders: &pb.HandOver{
			Blocks: blocks, Content: content, Ttl: durationpb.New(a.ttl), OnAbort: pb.OnAbort_ON_ABORT_KEEP,
		}},
	})
	if err != nil {
		return nil, refused(ctx, d.engine, "FinishedBlocks", err)
	}
	d.giveBack(ctx, a, blocks) // the lease pins them from now on
	return &handOver{grant: given.Grant}, nil
}

func (d *driven) push(ctx context.Context, a *attempt, _ *engine) error {
	blocks, content, err := d.computePrompt(ctx, a)
	if err != nil {
		return err
	}
	// The prompt is reported as one part. An engine that reports each chunk or layer can have each sent at once.
	_, err = d.client.Handoff.FinishedBlocks(ctx, &pb.FinishedBlocksRequest{
		TransferKey: a.key,
		RequestId:   a.id,
		Job: &pb.FinishedBlocksRequest_Part{Part: &pb.PushPart{
			Blocks: blocks, Content: content, Last: true, Ttl: durationpb.New(a.ttl),
		}},
	})
	if err != nil {
		return refused(ctx, d.engine, "FinishedBlocks", err)
	}
	d.giveBack(ctx, a, blocks)
	return nil
}

func (d *driven) computePrompt(ctx context.Context, a *attempt) (*pb.Blocks, *pb.Content, error) {
	prompt, err := a.prompt()
	if err != nil {
		return nil, nil, err
	}
	blocks, err := d.allocate(ctx, a, len(prompt))
	if err != nil {
		return nil, nil, err
	}
	return blocks, kvgrpc.TokenContent(prompt), d.compute(ctx, a, work{TokenIDs: prompt}, blocks)
}

func (d *driven) decode(ctx context.Context, a *attempt, handed *handOver) (failed error) {
	grant, err := handed.forDrive()
	if err != nil {
		return wrong("the prefill engine's kv_transfer_params: %w", err)
	}
	prompt, blocks, target, err := d.target(ctx, a)
	if err != nil {
		return err
	}
	defer func() {
		if failed != nil && ctx.Err() == nil {
			d.giveBack(ctx, a, blocks) // another try takes other blocks, here or elsewhere
		}
	}()
	pull, err := d.client.Handoff.PullBlocks(ctx, &pb.PullBlocksRequest{
		Pull:        &pb.PullBlocksRequest_Grant{Grant: grant},
		Content:     kvgrpc.TokenContent(prompt),
		Destination: &pb.PullDestination{Blocks: target},
		TransferKey: a.key,
		RequestId:   a.id,
	})
	if err != nil {
		return refused(ctx, d.engine, "PullBlocks", err)
	}
	return d.land(ctx, a, &landing{transferID: pull.Transfer.TransferId, blocks: blocks})
}

func (d *driven) expect(ctx context.Context, a *attempt, source *engine) (*landing, error) {
	prompt, blocks, target, err := d.target(ctx, a)
	if err != nil {
		return nil, err
	}
	reserved, err := d.client.Handoff.ReserveBlocks(ctx, &pb.ReserveBlocksRequest{
		TransferKey: a.key, RequestId: a.id, Blocks: target, Content: kvgrpc.TokenContent(prompt),
	})
	if err != nil {
		return nil, refused(ctx, d.engine, "ReserveBlocks", err)
	}
	a.tell(source)
	_, err = source.client.Handoff.RegisterPush(ctx, &pb.RegisterPushRequest{Grant: reserved.Grant, RequestId: a.id})
	if err != nil {
		return nil, refused(ctx, source, "RegisterPush", err)
	}
	return &landing{transferID: reserved.Transfer.TransferId, blocks: blocks, source: source}, nil
}

// land waits for the KV, and decodes. Only SUCCEEDED says that the KV is in the blocks.
func (d *driven) land(ctx context.Context, a *attempt, landing *landing) error {
	waiting, done := d.within(ctx)
	defer done()
	reply, err := d.client.Wait(waiting, landing.transferID, pb.WaitCondition_WAIT_CONDITION_ENDED, math.MaxInt64)
	if err != nil && context.Cause(waiting) == errLifeOver {
		return &failure{at: d.engine, what: "WaitTransfer", next: retryOther, err: errLifeOver}
	}
	if err != nil {
		return refused(ctx, d.engine, "WaitTransfer", err)
	}
	observe(ctx, reply.Transfer)
	if !kvgrpc.Succeeded(reply.Transfer) {
		return ended(d.engine, reply.Transfer)
	}
	prompt, err := a.prompt()
	if err != nil {
		return err
	}
	return d.generate(ctx, a, prompt, len(prompt), landing.blocks)
}

func (d *driven) alone(ctx context.Context, a *attempt) error {
	prompt, blocks, _, err := d.target(ctx, a)
	if err != nil {
		return err
	}
	return d.generate(ctx, a, prompt, 0, blocks)
}

// target returns the blocks for the prompt and its answer, and the blocks among them for the prompt's KV.
func (d *driven) target(ctx context.Context, a *attempt) (prompt []uint32, all, target *pb.Blocks, err error) {
	if prompt, err = a.prompt(); err != nil {
		return
	}
	wanted, err := a.maxTokens()
	if err != nil {
		return
	}
	if all, err = d.allocate(ctx, a, len(prompt)+wanted); err != nil {
		return
	}
	described, err := d.describe(ctx)
	if err != nil {
		return
	}
	return prompt, all, described.first(all, len(prompt)), nil
}

func (d *driven) generate(ctx context.Context, a *attempt, prompt []uint32, computed int, blocks *pb.Blocks) error {
	wanted, err := a.maxTokens()
	if err != nil {
		return err
	}
	return d.compute(ctx, a, work{TokenIDs: prompt, ComputedTokens: computed, MaxTokens: wanted}, blocks)
}
