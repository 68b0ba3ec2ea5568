package kvgrpc

import (
	"context"
	"fmt"
	"iter"
	"time"

	"google.golang.org/grpc/codes"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// Point is a point in the changes of an engine's transfers. The zero value is the present.
type Point struct {
	EventSeq uint64
	// Incarnation identifies the life of the engine that EventSeq belongs to.
	Incarnation uint64
}

// PointOf returns the point up to which a reply reports everything. A watch from this point misses nothing.
func PointOf(header *pb.ResponseHeader) Point {
	return Point{header.GetEventSeq(), header.GetIncarnation()}
}

// Watch yields every change of the matching transfers after a point, each as the whole transfer. When a stream breaks,
// Watch resumes after the last message, with growing pauses, until the context ends. An error is the last item of the
// loop:
//
//	for change, err := range client.Watch(ctx, filter, after) { ... }
//
// Watch yields messages as the server sends them. A message without a transfer states how far the watch has got. A
// message with HistoryLost states that changes are missing: list the transfers. The watch continues after it. The error
// INCARNATION_CHANGED states that the engine has restarted: its transfers are gone.
func (c *Client) Watch(
	ctx context.Context, filter *pb.TransferFilter, after Point,
) iter.Seq2[*pb.WatchTransfersResponse, error] {
	return func(yield func(*pb.WatchTransfersResponse, error) bool) {
		ctx, cancel := c.bound(ctx)
		defer cancel()
		after := after // each loop over the sequence starts from the same point
		var pauses pauses
		for {
			opened := time.Now()
			wanted, err := c.watchOnce(ctx, filter, &after, yield)
			if !wanted {
				return
			}
			pauses.after(time.Since(opened))
			if ctx.Err() == nil && brokenOrFull(err) && pauses.take(ctx, retryDelay(err)) == nil {
				continue
			}
			if ctx.Err() != nil {
				err = overError(ctx)
			}
			yield(nil, err)
			return
		}
	}
}

// watchOnce reads one stream, and moves the point with every message. It returns false when the caller wants no more.
func (c *Client) watchOnce(
	ctx context.Context, filter *pb.TransferFilter, after *Point, yield func(*pb.WatchTransfersResponse, error) bool,
) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Transfers.WatchTransfers(ctx, &pb.WatchTransfersRequest{
		Filter: filter, AfterEventSeq: after.EventSeq, Incarnation: after.Incarnation,
	})
	if err != nil {
		return true, err
	}
	for {
		change, err := stream.Recv()
		if err != nil {
			return true, err
		}
		if after.Incarnation != 0 && change.GetHeader().GetIncarnation() != after.Incarnation {
			return true, incarnationChanged(after.Incarnation, change.GetHeader())
		}
		*after = PointOf(change.GetHeader())
		if !yield(change, nil) {
			return false, nil
		}
	}
}

// incarnationChanged returns the error for a server that resumes a watch in another incarnation of its engine.
func incarnationChanged(watched uint64, header *pb.ResponseHeader) *Error {
	return &Error{
		Code:        codes.Aborted,
		Reason:      "INCARNATION_CHANGED",
		Next:        "RECOMPUTE",
		Message:     fmt.Sprintf("incarnation %d, which was watched, is over", watched),
		EngineID:    header.GetEngineId(),
		Incarnation: header.GetIncarnation(),
	}
}

// overError returns the error of a loop whose context has ended.
func overError(ctx context.Context) *Error {
	code := codes.Canceled
	if ctx.Err() == context.DeadlineExceeded {
		code = codes.DeadlineExceeded
	}
	return &Error{Code: code, Message: context.Cause(ctx).Error(), cause: ctx.Err()}
}
