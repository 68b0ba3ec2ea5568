package kvgrpc

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// One call waits half of what a server allows, so that proxies with a limit of one minute let it pass.
const waitOnce = 30 * time.Second

// Wait returns the transfer once it has met the condition, or its current state when the timeout is over; ConditionMet
// tells which. The timeout may exceed the minute that one WaitTransfer lasts. While time is left, Wait calls again when
// the server is away or too busy. The wait also ends with its context and its client.
func (c *Client) Wait(
	ctx context.Context, transferID string, until pb.WaitCondition, timeout time.Duration,
) (*pb.WaitTransferResponse, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	over := time.Now().Add(timeout)
	var pauses pauses
	for {
		begun := time.Now()
		once := min(max(over.Sub(begun), time.Millisecond), waitOnce)
		reply, err := c.waitOnce(ctx, transferID, until, once)
		left := time.Until(over)
		switch {
		case err == nil && (reply.ConditionMet || left <= 0):
			return reply, nil
		case err == nil && time.Since(begun) >= once/2:
			continue
		case err != nil && ctx.Err() != nil && passes(err):
			return nil, overError(ctx)
		case err != nil && (left <= 0 || !passes(err)):
			return nil, err
		}
		// There was no answer, or the server answered early. The pause prevents a busy loop.
		pausing, cancel := context.WithTimeout(ctx, left)
		_ = pauses.take(pausing, retryDelay(err))
		cancel()
	}
}

func (c *Client) waitOnce(
	ctx context.Context, transferID string, until pb.WaitCondition, once time.Duration,
) (*pb.WaitTransferResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, once+c.timeout)
	defer cancel()
	return c.Transfers.WaitTransfer(ctx, &pb.WaitTransferRequest{
		TransferId: transferID, Until: until, Timeout: durationpb.New(once),
	})
}

// passes reports whether a wait continues after an error: the server was away, too busy, or silent for one call, or the
// connection was cut.
func passes(err error) bool {
	return brokenOrFull(err) || status.Code(err) == codes.DeadlineExceeded
}
