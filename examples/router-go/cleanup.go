package main

import (
	"context"
	"errors"
	"log/slog"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// end ends an attempt in the background. The client waits neither for that nor for an engine that is away. What the
// router cannot tell an engine ends there by itself, because leases, allocations and registrations have time limits.
func (r *router) end(ctx context.Context, a *attempt, why error) {
	left := a.leave(why != nil)
	message := "done"
	switch {
	case ctx.Err() != nil:
		message = "the client hung up"
	case why != nil:
		message = why.Error()
	}
	ctx = context.WithoutCancel(ctx)
	r.ending.Go(func() {
		cancel(ctx, a, message, left.cancelled)
		for e, allocations := range left.freed {
			for _, allocation := range allocations {
				free(ctx, e, allocation)
			}
		}
	})
	for _, written := range left.written {
		r.ending.Go(func() {
			// Freed blocks may belong to another request at once, so no block that may still be written is freed.
			if err := stop(ctx, written.at, a, written.computation); err != nil {
				slog.Warn("not freed, it ends with its time", "request", a.id, "engine", written.at.String(),
					"allocation", written.id, "error", err)
				return
			}
			free(ctx, written.at, written.id)
		})
	}
}

// cancel ends everything under the attempt's key at these engines, later arrivals included, and frees the attempt's
// allocations.
func cancel(ctx context.Context, a *attempt, message string, engines map[*engine][]string) {
	var sides []kvgrpc.Side
	var order []*engine
	for e, allocations := range engines {
		sides = append(sides, kvgrpc.Side{Client: e.client, TransferKey: a.key, FreeAllocationIDs: allocations})
		order = append(order, e)
	}
	for i, result := range kvgrpc.CleanUp(ctx, message, sides...) {
		if result.Err != nil {
			slog.Warn("not cleaned up", "request", a.id, "engine", order[i].String(), "error", result.Err)
			continue
		}
		slog.Info("cancelled", "request", a.id, "engine", order[i].String(), "message", message,
			"outcome", kvgrpc.Outcome(result.Response).String())
	}
}

// free gives an allocation back. Its pinned blocks become free at their last unpin.
func free(ctx context.Context, e *engine, allocation string) {
	_, err := e.client.Pool.FreeBlocks(ctx, &pb.FreeBlocksRequest{
		Freed: &pb.FreeBlocksRequest_AllocationId{AllocationId: allocation},
	})
	var typed *kvgrpc.Error
	if err != nil && !(errors.As(err, &typed) && typed.Reason == "BLOCK_NOT_ALLOCATED") {
		slog.Warn("not freed", "engine", e.String(), "error", err)
	}
}
