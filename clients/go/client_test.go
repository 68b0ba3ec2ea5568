package kvgrpc

import (
	"context"
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func TestAClientThatIsClosedEndsItsLoops(t *testing.T) {
	fake := &renewals{asked: make(chan *pb.KeepAliveRequest, 1)}
	server := serve(t, "", life(7), &leases{keep: fake.keep}, &transfers{}, &schedulers{schedule: (&policy{}).schedule})
	server.grpc.Stop()
	client, err := Connect(server.address, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	lease := client.KeepAlive(ctx, 0).Add(LeaseByID("a"))
	scheduler := client.Scheduler(ctx)
	ended := make(chan error)
	go func() {
		for _, err := range client.Watch(ctx, nil, Point{}) {
			ended <- err
		}
	}()
	go func() {
		for range client.WatchEngine(ctx, 0) {
		}
		ended <- nil
	}()
	go func() {
		_, err := scheduler.Step(limited(t))
		ended <- err
	}()
	client.Close()
	for range 3 {
		if err := next(t, ended); err != nil && status.Code(err) != codes.Canceled && status.Code(err) != codes.Unavailable {
			t.Error(err)
		}
	}
	if end := over(t, lease); end.State != pb.LeaseState_LEASE_STATE_LIVE || !errors.Is(end.Err, context.Canceled) {
		t.Errorf("%+v", end)
	}
	if _, err := client.Transfers.GetTransfer(ctx, &pb.GetTransferRequest{}); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
}

func TestAClientHasAPositiveTimeout(t *testing.T) {
	if _, err := Connect("127.0.0.1:1", Options{Timeout: -1}); err == nil {
		t.Error("a negative timeout was taken")
	}
}
