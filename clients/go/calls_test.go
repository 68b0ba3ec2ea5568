package kvgrpc

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func TestACallThatWaitsGetsItsWaitOnTopOfTheUsualDeadline(t *testing.T) {
	const usual = 10 * time.Second
	for _, row := range []struct {
		request any
		want    time.Duration
	}{
		{&pb.GetTransferRequest{}, usual},
		{&pb.WaitTransferRequest{}, 70 * time.Second},
		{&pb.WaitTransferRequest{Timeout: after(5 * time.Second)}, 15 * time.Second},
		{&pb.WaitTransferRequest{Timeout: after(time.Hour)}, 70 * time.Second},
		{&pb.WaitTransfersRequest{Timeout: after(20 * time.Second)}, 30 * time.Second},
		{&pb.PullBlocksRequest{}, usual},
		{&pb.PullBlocksRequest{Wait: &pb.TransferWait{}}, 70 * time.Second},
		{&pb.ReserveBlocksRequest{Wait: &pb.TransferWait{Timeout: after(5 * time.Second)}}, 15 * time.Second},
		{&pb.PollSchedulerNewsRequest{}, usual},
		{&pb.PollSchedulerNewsRequest{Wait: after(30 * time.Second)}, 40 * time.Second},
		{&pb.GetTensorRequest{}, 70 * time.Second},
		{&pb.GetTensorRequest{Timeout: after(5 * time.Second)}, 15 * time.Second},
		{&pb.PutTensorRequest{}, 130 * time.Second},
		{&pb.PutTensorRequest{Timeout: after(5 * time.Second)}, 15 * time.Second},
		{&pb.PutTensorRequest{Timeout: after(time.Hour)}, 610 * time.Second},
		{&pb.ConnectPeerRequest{}, time.Minute},
		{&pb.ReleaseQuarantineRequest{}, time.Minute},
	} {
		if got := deadline(row.request, usual); got != row.want {
			t.Errorf("%T: %v, want %v", row.request, got, row.want)
		}
	}
}

func TestEveryUnaryCallHasADeadlineAndAStatedOneCounts(t *testing.T) {
	left := make(chan time.Duration, 2)
	server := serve(t, "", &transfers{
		get: func(ctx context.Context, _ *pb.GetTransferRequest) (*pb.GetTransferResponse, error) {
			until, _ := ctx.Deadline()
			left <- time.Until(until)
			return &pb.GetTransferResponse{}, nil
		},
	})
	client := connect(t, server, Options{})
	client.Transfers.GetTransfer(context.Background(), &pb.GetTransferRequest{})
	if got := <-left; got <= 0 || got > 10*time.Second {
		t.Errorf("the usual deadline is in %v", got)
	}
	stated, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	client.Transfers.GetTransfer(stated, &pb.GetTransferRequest{})
	if got := <-left; got < time.Minute {
		t.Errorf("the stated deadline is in %v", got)
	}
}

func TestADeadlineThatPassesIsATypedErrorAndThatOfTheContext(t *testing.T) {
	server := serve(t, "", &transfers{
		get: func(ctx context.Context, _ *pb.GetTransferRequest) (*pb.GetTransferResponse, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
	})
	client := connect(t, server, Options{Timeout: 50 * time.Millisecond})
	_, err := client.Transfers.GetTransfer(t.Context(), &pb.GetTransferRequest{})
	var failed *Error
	if !errors.As(err, &failed) || failed.Code != codes.DeadlineExceeded || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%#v", err)
	}
}

func TestRepetitionsOfACallCarryOneIdempotencyKey(t *testing.T) {
	var keys []string
	server := serve(t, "", &pool{
		allocate: func(_ context.Context, r *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
			if keys = append(keys, r.IdempotencyKey); len(keys) < 3 {
				return nil, refusal(codes.Unavailable, "NO_POOL", "RETRY_HERE")
			}
			return &pb.AllocateBlocksResponse{}, nil
		},
	})
	client := connect(t, server, Options{})
	request := &pb.AllocateBlocksRequest{GroupBlockCounts: []*pb.GroupBlockCount{{BlockCount: 3}}}
	if _, err := client.Pool.AllocateBlocks(limited(t), request); err != nil {
		t.Fatal(err)
	}
	if len(keys) != 3 || keys[0] == "" || keys[0] != keys[1] || keys[1] != keys[2] {
		t.Errorf("keys %q", keys)
	}
	if request.IdempotencyKey != "" {
		t.Error("the caller's message was changed")
	}
	client.Pool.AllocateBlocks(limited(t), request)
	if len(keys) != 4 || keys[3] == keys[0] {
		t.Errorf("the second call has the key of the first: %q", keys)
	}
}

func TestAStatedIdempotencyKeyIsKeptAndTheWholeRequestArrives(t *testing.T) {
	var got *pb.AllocateBlocksRequest
	server := serve(t, "", &pool{
		allocate: func(_ context.Context, r *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
			got = r
			return nil, refusal(codes.ResourceExhausted, "POOL_EXHAUSTED", "RETRY_HERE")
		},
	})
	client := connect(t, server, Options{})
	request := &pb.AllocateBlocksRequest{
		IdempotencyKey: "mine", NoExpiry: true, GroupBlockCounts: []*pb.GroupBlockCount{{Group: 1, BlockCount: 3}},
	}
	_, err := client.Pool.AllocateBlocks(limited(t), request)
	if got.IdempotencyKey != "mine" || !got.NoExpiry || got.GroupBlockCounts[0].BlockCount != 3 {
		t.Errorf("%v", got)
	}
	request.IdempotencyKey = ""
	_, err = client.Pool.AllocateBlocks(limited(t), request)
	var failed *Error
	if !errors.As(err, &failed) || failed.IdempotencyKey != got.IdempotencyKey {
		t.Errorf("the error has the key %q, the request %q", failed.IdempotencyKey, got.IdempotencyKey)
	}
	if !got.NoExpiry || got.GroupBlockCounts[0].BlockCount != 3 {
		t.Errorf("the copy lacks fields: %v", got)
	}
}

func TestOnlyUnavailableIsRepeated(t *testing.T) {
	calls := 0
	server := serve(t, "", &pool{
		allocate: func(context.Context, *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
			calls++
			return nil, refusal(codes.ResourceExhausted, "POOL_EXHAUSTED", "RETRY_HERE")
		},
	})
	client := connect(t, server, Options{})
	_, err := client.Pool.AllocateBlocks(limited(t), &pb.AllocateBlocksRequest{})
	if status.Code(err) != codes.ResourceExhausted || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func TestACallThatAnEndingServerHasNotBegunIsRepeatedWithItsKey(t *testing.T) {
	var keys []string
	ended := 1
	server := serve(t, "", &pool{
		allocate: func(_ context.Context, r *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
			if keys = append(keys, r.IdempotencyKey); len(keys) <= ended {
				return nil, status.Error(codes.Canceled, "CANCELLED")
			}
			return &pb.AllocateBlocksResponse{}, nil
		},
	})
	client := connect(t, server, Options{})
	if _, err := client.Pool.AllocateBlocks(limited(t), &pb.AllocateBlocksRequest{}); err != nil {
		t.Fatal(err)
	}
	if len(keys) != 2 || keys[0] == "" || keys[0] != keys[1] {
		t.Errorf("keys %q", keys)
	}
	keys, ended = nil, 100
	_, err := client.Pool.AllocateBlocks(limited(t), &pb.AllocateBlocksRequest{})
	if status.Code(err) != codes.Canceled || len(keys) != 1+notBegunRepeats {
		t.Errorf("%d calls, %v", len(keys), err)
	}
}

func TestACallThatAServerCancelsForAReasonIsNotRepeated(t *testing.T) {
	calls := 0
	server := serve(t, "", &pool{
		allocate: func(context.Context, *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
			calls++
			return nil, refusal(codes.Canceled, "CANCELLED", "RETRY_HERE")
		},
	})
	client := connect(t, server, Options{})
	_, err := client.Pool.AllocateBlocks(limited(t), &pb.AllocateBlocksRequest{})
	if status.Code(err) != codes.Canceled || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func TestACallThatItsCallerCancelsIsNotRepeated(t *testing.T) {
	begun := make(chan struct{}, 1+notBegunRepeats)
	server := serve(t, "", &pool{
		allocate: func(ctx context.Context, _ *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
			begun <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		},
	})
	client := connect(t, server, Options{})
	ctx, cancel := context.WithCancel(limited(t))
	go func() {
		<-begun
		cancel()
	}()
	_, err := client.Pool.AllocateBlocks(ctx, &pb.AllocateBlocksRequest{})
	if !errors.Is(err, context.Canceled) || len(begun) != 0 {
		t.Errorf("%d more calls, %v", len(begun), err)
	}
}

func TestConnectPeerIsNotRepeated(t *testing.T) {
	calls := 0
	server := serve(t, "", &handshakes{
		connect: func(context.Context, *pb.ConnectPeerRequest) (*pb.ConnectPeerResponse, error) {
			calls++
			return nil, refusal(codes.Unavailable, "PEER_UNREACHABLE", "RETRY_HERE")
		},
	})
	client := connect(t, server, Options{})
	_, err := client.Handshake.ConnectPeer(limited(t), &pb.ConnectPeerRequest{})
	if status.Code(err) != codes.Unavailable || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func TestTheTraceOfACallIsPassedOnOnce(t *testing.T) {
	var got metadata.MD
	server := serve(t, "", &transfers{
		get: func(ctx context.Context, _ *pb.GetTransferRequest) (*pb.GetTransferResponse, error) {
			got, _ = metadata.FromIncomingContext(ctx)
			return &pb.GetTransferResponse{}, nil
		},
	})
	client := connect(t, server, Options{
		Metadata:    map[string]string{"authorization": "Bearer x"},
		Traceparent: func(context.Context) string { return "of-the-option" },
	})
	client.Transfers.GetTransfer(limited(t), &pb.GetTransferRequest{})
	if trace := got.Get("traceparent"); len(trace) != 1 || trace[0] != "of-the-option" {
		t.Errorf("traceparent %q", trace)
	}
	client.Transfers.GetTransfer(WithTraceparent(limited(t), "of-the-call"), &pb.GetTransferRequest{})
	if trace := got.Get("traceparent"); len(trace) != 1 || trace[0] != "of-the-call" {
		t.Errorf("traceparent %q", trace)
	}
	if who := got.Get("authorization"); len(who) != 1 || who[0] != "Bearer x" {
		t.Errorf("authorization %q", who)
	}
}
