package kvgrpc

import (
	"context"
	"fmt"
	"io"
	"iter"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// EngineUpdate is the status of an engine, or the error that makes it unreachable. Exactly one field is set.
type EngineUpdate struct {
	// Response is the engine's status. A new incarnation in its header says that the leases, grants and transfers of
	// the previous one are gone.
	Response *pb.WatchEngineResponse
	// Unreachable is why the engine cannot be reached now. It is reported once for each outage, and again when the
	// cause changes. The error of a watch that ends by itself is its last update.
	Unreachable error
}

// WatchEngine yields the status of the engine at once and whenever it changes, at most once in each interval (0 means
// 0.1 s). It reconnects without limit, with pauses of 0.1 s to 2 s, and ends with its context. It ends by itself with
// the errors that any other stream would get too: INVALID_ARGUMENT, PERMISSION_DENIED, UNAUTHENTICATED and
// UNIMPLEMENTED.
func (c *Client) WatchEngine(ctx context.Context, minInterval time.Duration) iter.Seq[EngineUpdate] {
	return func(yield func(EngineUpdate) bool) {
		ctx, cancel := c.bound(ctx)
		defer cancel()
		var pauses pauses
		told := codes.OK
		for {
			opened := time.Now()
			wanted, stood, err := c.watchEngineOnce(ctx, minInterval, yield)
			if !wanted || ctx.Err() != nil {
				return
			}
			if stood {
				told = codes.OK
			}
			if code := status.Code(err); code != told {
				told = code
				if !yield(EngineUpdate{Unreachable: err}) {
					return
				}
			}
			switch told {
			case codes.InvalidArgument, codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented:
				return
			}
			pauses.after(time.Since(opened))
			if pauses.take(ctx, retryDelay(err)) != nil {
				return
			}
		}
	}
}

// watchEngineOnce reads one stream. It returns whether the caller wants more, and whether there was a message.
func (c *Client) watchEngineOnce(
	ctx context.Context, minInterval time.Duration, yield func(EngineUpdate) bool,
) (wanted, stood bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A dead host sends nothing. Missing the server's regular messages shows that sooner than the connection does.
	silence := max(c.silence, 3*minInterval)
	var silent atomic.Bool
	watchdog := time.AfterFunc(silence, func() {
		silent.Store(true)
		cancel()
	})
	defer watchdog.Stop()
	request := &pb.WatchEngineRequest{}
	if minInterval > 0 {
		request.MinInterval = durationpb.New(minInterval)
	}
	stream, err := c.Handshake.WatchEngine(ctx, request)
	for err == nil {
		var response *pb.WatchEngineResponse
		if response, err = stream.Recv(); err != nil {
			break
		}
		stood = true
		watchdog.Stop() // a slow caller is not a silent engine
		if !yield(EngineUpdate{Response: response}) {
			return false, true, nil
		}
		watchdog.Reset(silence)
	}
	if silent.Load() {
		err = &Error{Code: codes.Unavailable, Message: fmt.Sprintf("the engine has said nothing for %v", silence)}
	} else if err == io.EOF {
		err = &Error{Code: codes.Unavailable, Message: "the server ended the watch"}
	}
	return true, stood, err
}
