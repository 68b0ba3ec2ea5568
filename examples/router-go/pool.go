package main

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// pool is what the router must know of a driven engine's pool.
type pool struct {
	incarnation uint64
	// blockTokens is the block size of each group, in tokens.
	blockTokens []uint32
}

// describe asks for the pool, once in each life of the engine.
func (d *driven) describe(ctx context.Context) (*pool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pool != nil && d.pool.incarnation == d.incarnation() {
		return d.pool, nil
	}
	reply, err := d.client.Pool.DescribePools(ctx, &pb.DescribePoolsRequest{})
	if err != nil {
		return nil, refused(ctx, d.engine, "DescribePools", err)
	}
	found := &pool{incarnation: reply.Header.GetIncarnation()}
	for _, group := range reply.Pools[0].Groups {
		switch group.Kind {
		case pb.GroupKind_GROUP_KIND_FULL_ATTENTION, pb.GroupKind_GROUP_KIND_MLA:
			found.blockTokens = append(found.blockTokens, group.BlockTokens)
		default:
			// The blocks of windows and states differ for each part of a request: see docs/protocol.md.
			return nil, &failure{at: d.engine, what: "its pool", next: retryOther,
				err: fmt.Errorf("this router cannot manage blocks of a group that is %v", group.Kind)}
		}
	}
	d.pool = found
	return found, nil
}

// blocks returns how many blocks of a group hold so many tokens.
func (p *pool) blocks(group, tokens int) uint32 {
	size := int(p.blockTokens[group])
	return uint32((tokens + size - 1) / size)
}

// first returns the blocks of an allocation that hold its first tokens. They keep the life and the allocation id.
func (p *pool) first(blocks *pb.Blocks, tokens int) *pb.Blocks {
	cut := &pb.Blocks{Incarnation: blocks.Incarnation, AllocationId: blocks.AllocationId}
	for _, group := range blocks.Groups {
		left := p.blocks(int(group.Group), tokens)
		runs := &pb.BlockRuns{}
		for i, start := range group.Runs.Starts {
			if count := min(left, group.Runs.Counts[i]); count > 0 {
				runs.Starts, runs.Counts = append(runs.Starts, start), append(runs.Counts, count)
				left -= count
			}
		}
		cut.Groups = append(cut.Groups, &pb.GroupBlocks{Group: group.Group, Runs: runs})
	}
	return cut
}

// allocate takes blocks for so many tokens, and keeps them until they are given back or the attempt ends.
func (d *driven) allocate(ctx context.Context, a *attempt, tokens int) (*pb.Blocks, error) {
	described, err := d.describe(ctx)
	if err != nil {
		return nil, err
	}
	request := &pb.AllocateBlocksRequest{Ttl: durationpb.New(allocationTTL)}
	for group := range described.blockTokens {
		request.GroupBlockCounts = append(request.GroupBlockCounts,
			&pb.GroupBlockCount{Group: uint32(group), BlockCount: described.blocks(group, tokens)})
	}
	a.tell(d.engine)
	// The call is not cancelled with the request, because blocks with an unknown id could not be given back.
	reply, err := d.client.Pool.AllocateBlocks(context.WithoutCancel(ctx), request)
	if err != nil {
		return nil, refused(ctx, d.engine, "AllocateBlocks", err)
	}
	renewing, stop := context.WithCancel(context.WithoutCancel(ctx))
	a.hold(d.engine, reply.Blocks.AllocationId, stop)
	go d.renew(renewing, reply.Blocks.AllocationId)
	return reply.Blocks, ctx.Err()
}

// renew keeps an allocation. If the allocation is gone, the next call with its blocks reports that.
func (d *driven) renew(ctx context.Context, allocation string) {
	for sleep(ctx, allocationTTL/3) {
		_, err := d.client.Pool.AllocateBlocks(ctx, &pb.AllocateBlocksRequest{
			AllocationId: allocation, Ttl: durationpb.New(allocationTTL),
		})
		if errors.Is(err, context.Canceled) {
			return
		}
	}
}

// giveBack frees an allocation. Blocks that a lease pins become free with the lease and need no further call.
func (d *driven) giveBack(ctx context.Context, a *attempt, blocks *pb.Blocks) {
	if a.letGo(d.engine, blocks.AllocationId) {
		free(context.WithoutCancel(ctx), d.engine, blocks.AllocationId)
	}
}
