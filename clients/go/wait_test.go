package kvgrpc

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

type waiter = func(context.Context, *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error)

func waitAt(t *testing.T, wait waiter) *Client {
	return connect(t, serve(t, "", &transfers{wait: wait}), Options{})
}

const ended, returned = pb.WaitCondition_WAIT_CONDITION_ENDED, pb.WaitCondition_WAIT_CONDITION_RETURNED

func TestALongWaitIsManyWaitsThatAServerAllows(t *testing.T) {
	calls := 0
	client := waitAt(t, func(_ context.Context, r *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
		calls++
		if once := r.Timeout.AsDuration(); once <= 0 || once > time.Minute || r.TransferId != "t" || r.Until != returned {
			t.Errorf("%v", r)
		}
		return &pb.WaitTransferResponse{ConditionMet: calls == 3, Transfer: &pb.Transfer{TransferId: "t"}}, nil
	})
	reply, err := client.Wait(limited(t), "t", returned, time.Hour)
	if err != nil || !reply.ConditionMet || reply.Transfer.TransferId != "t" || calls != 3 {
		t.Errorf("%d calls, %v, %v", calls, reply, err)
	}
}

func TestAWaitThatIsOverGivesTheTransferAsItIs(t *testing.T) {
	client := waitAt(t, func(_ context.Context, r *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
		time.Sleep(r.Timeout.AsDuration()) // as a server does
		return &pb.WaitTransferResponse{Transfer: &pb.Transfer{State: pb.TransferState_TRANSFER_STATE_ACTIVE}}, nil
	})
	reply, err := client.Wait(limited(t), "t", ended, 50*time.Millisecond)
	if err != nil || reply.ConditionMet || reply.Transfer.State != pb.TransferState_TRANSFER_STATE_ACTIVE {
		t.Errorf("%v, %v", reply, err)
	}
}

func TestAWaitWithoutTimeLooksOnce(t *testing.T) {
	calls := 0
	client := waitAt(t, func(_ context.Context, r *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
		calls++
		if r.Timeout.AsDuration() <= 0 {
			t.Error("a server reads no time as its longest")
		}
		return &pb.WaitTransferResponse{}, nil
	})
	if reply, err := client.Wait(limited(t), "t", ended, 0); err != nil || reply.ConditionMet || calls != 1 {
		t.Errorf("%d calls, %v, %v", calls, reply, err)
	}
}

func TestAWaitSurvivesAServerThatIsAway(t *testing.T) {
	calls := 0
	client := waitAt(t, func(context.Context, *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
		if calls++; calls < 6 { // gRPC alone gives up after 4
			return nil, refusal(codes.Unavailable, "ENGINE_LOST", "RETRY_HERE")
		}
		return &pb.WaitTransferResponse{ConditionMet: true}, nil
	})
	reply, err := client.Wait(limited(t), "t", ended, time.Minute)
	if err != nil || !reply.ConditionMet {
		t.Errorf("%v, %v", reply, err)
	}
}

func TestAWaitSurvivesWhatPassesAndCallsThatNoServerAnswered(t *testing.T) {
	passing := []error{
		refusal(codes.ResourceExhausted, "QUEUE_FULL", "RETRY_HERE"),
		refusal(codes.DeadlineExceeded, "DEADLINE", "RETRY_HERE"),
		status.Error(codes.Canceled, "reset by a proxy"),
		status.Error(codes.Internal, "RST_STREAM"),
		status.Error(codes.Unknown, "no trailers"),
	}
	client := waitAt(t, func(context.Context, *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
		if len(passing) > 0 {
			err := passing[0]
			passing = passing[1:]
			return nil, err
		}
		return &pb.WaitTransferResponse{ConditionMet: true}, nil
	})
	reply, err := client.Wait(limited(t), "t", ended, time.Minute)
	if err != nil || !reply.ConditionMet {
		t.Errorf("%v, %v, and %v are left", reply, err, passing)
	}
}

func TestAWaitEndsWithARefusalThatCarriesAReason(t *testing.T) {
	for _, code := range []codes.Code{codes.Canceled, codes.Internal, codes.Unknown} {
		calls := 0
		client := waitAt(t, func(context.Context, *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
			calls++
			return nil, refusal(code, "INTERNAL", "RECOMPUTE")
		})
		if _, err := client.Wait(limited(t), "t", ended, time.Hour); status.Code(err) != code || calls != 1 {
			t.Errorf("%d calls, %v", calls, err)
		}
	}
}

// waiting starts a wait at a server that does not answer, and returns when the call has arrived there.
func waiting(t *testing.T, ctx context.Context) (*Client, <-chan error) {
	arrived, failed := make(chan bool, 9), make(chan error, 1)
	client := waitAt(t, func(ctx context.Context, _ *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
		arrived <- true
		<-ctx.Done()
		return nil, ctx.Err()
	})
	go func() {
		_, err := client.Wait(ctx, "t", ended, time.Hour)
		failed <- err
	}()
	next(t, arrived)
	return client, failed
}

func TestAWaitEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(limited(t))
	_, failed := waiting(t, ctx)
	cancel()
	if err := next(t, failed); status.Code(err) != codes.Canceled || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestAWaitEndsWithItsClient(t *testing.T) {
	client, failed := waiting(t, context.Background())
	client.Close()
	if err := next(t, failed); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	if _, err := client.Wait(limited(t), "t", ended, time.Hour); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
}

func TestAWaitForAServerThatStaysAwayEndsWithItsTime(t *testing.T) {
	server := serve(t, "", &transfers{})
	server.grpc.Stop()
	_, err := connect(t, server, Options{}).Wait(limited(t), "t", ended, 300*time.Millisecond)
	if status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
}

func TestAWaitForAnUnknownTransferEndsAtOnce(t *testing.T) {
	client := waitAt(t, func(context.Context, *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
		return nil, refusal(codes.NotFound, "TRANSFER_NOT_FOUND", "RECOMPUTE")
	})
	if _, err := client.Wait(limited(t), "t", ended, time.Hour); status.Code(err) != codes.NotFound {
		t.Error(err)
	}
}
