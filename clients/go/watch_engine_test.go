package kvgrpc

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

type engineStream = grpc.ServerStreamingServer[pb.WatchEngineResponse]

func engine(watch func(*pb.WatchEngineRequest, engineStream) error) *handshakes {
	return &handshakes{watch: watch}
}

// life sends the status of one life, and then nothing.
func life(incarnation uint64) *handshakes {
	return engine(func(_ *pb.WatchEngineRequest, stream engineStream) error {
		stream.Send(&pb.WatchEngineResponse{Header: header(0, incarnation)})
		<-stream.Context().Done()
		return nil
	})
}

// updates reads a watch into a channel until the test ends.
func updates(t *testing.T, client *Client) <-chan EngineUpdate {
	read := make(chan EngineUpdate)
	ctx := limited(t)
	go func() {
		defer close(read)
		for update := range client.WatchEngine(ctx, 0) {
			select {
			case read <- update:
			case <-ctx.Done():
				return
			}
		}
	}()
	return read
}

func TestAWatchOfAnEngineOutlastsItsLivesAndTellsWhenItIsAway(t *testing.T) {
	first := serve(t, "", life(7))
	read := updates(t, connect(t, first, Options{}))
	if got := next(t, read); got.Response.GetHeader().GetIncarnation() != 7 {
		t.Fatalf("%+v", got)
	}
	first.grpc.Stop()
	if got := next(t, read); got.Response != nil || status.Code(got.Unreachable) != codes.Unavailable {
		t.Fatalf("%+v", got)
	}
	serve(t, first.address, life(8))
	if got := next(t, read); got.Response.GetHeader().GetIncarnation() != 8 {
		t.Fatalf("once told, an outage is told again: %+v", got)
	}
}

func TestAnEngineThatFallsSilentIsUnreachable(t *testing.T) {
	client := connect(t, serve(t, "", life(7)), Options{})
	client.silence = 50 * time.Millisecond
	read := updates(t, client)
	next(t, read)
	if got := next(t, read); status.Code(got.Unreachable) != codes.Unavailable {
		t.Fatalf("%+v", got)
	}
	if got := next(t, read); got.Response == nil {
		t.Fatalf("it is not asked again: %+v", got)
	}
}

func TestAWatchOfAnEngineThatIsRefusedIsToldAndTriedAgain(t *testing.T) {
	var calls atomic.Int32
	client := connect(t, serve(t, "", engine(func(r *pb.WatchEngineRequest, stream engineStream) error {
		if r.MinInterval != nil {
			t.Errorf("interval %v", r.MinInterval)
		}
		if calls.Add(1) < 3 {
			return refusal(codes.ResourceExhausted, "LIMIT_EXCEEDED", "RETRY_HERE")
		}
		return stream.Send(&pb.WatchEngineResponse{Header: header(0, 7)})
	})), Options{})
	read := updates(t, client)
	if got := next(t, read); status.Code(got.Unreachable) != codes.ResourceExhausted {
		t.Fatalf("%+v", got)
	}
	if got := next(t, read); got.Response == nil {
		t.Fatalf("%+v", got)
	}
}

func TestAWatchOfAnEngineEndsWithARefusalThatNoRepetitionChanges(t *testing.T) {
	final := []codes.Code{codes.InvalidArgument, codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented}
	for _, code := range final {
		var calls atomic.Int32
		client := connect(t, serve(t, "", engine(func(*pb.WatchEngineRequest, engineStream) error {
			calls.Add(1)
			return status.Error(code, "no")
		})), Options{})
		read := updates(t, client)
		if got := next(t, read); status.Code(got.Unreachable) != code {
			t.Errorf("%+v", got)
		}
		if got, more := <-read; more || calls.Load() != 1 {
			t.Errorf("%d calls, %+v", calls.Load(), got)
		}
	}
}

func TestAWatchOfAnEngineEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(limited(t))
	for range connect(t, serve(t, "", life(7)), Options{}).WatchEngine(ctx, time.Second) {
		cancel()
	}
	cancel()
}
