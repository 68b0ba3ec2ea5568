package kvgrpc

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

type keepStream = grpc.BidiStreamingServer[pb.KeepAliveRequest, pb.KeepAliveResponse]

// renewals answers each renewal with rows, and counts streams and requests.
type renewals struct {
	streams, requests atomic.Int32
	asked             chan *pb.KeepAliveRequest
	rows              func(request int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error)
}

func (f *renewals) keep(stream keepStream) error {
	f.streams.Add(1)
	for {
		request, err := stream.Recv()
		if err != nil {
			return nil
		}
		rows, err := f.rows(int(f.requests.Add(1)), request)
		if err != nil {
			return err
		}
		select {
		case f.asked <- request:
		default:
		}
		stream.Send(&pb.KeepAliveResponse{Header: header(0, 7), Leases: rows})
	}
}

func live(left time.Duration) *pb.RenewedLease {
	return &pb.RenewedLease{Remaining: after(left), State: pb.LeaseState_LEASE_STATE_LIVE}
}

func all(r *pb.KeepAliveRequest, row *pb.RenewedLease) (rows []*pb.RenewedLease) {
	for range r.Leases {
		rows = append(rows, row)
	}
	return rows
}

func keeperOf(t *testing.T, fake *renewals) (*server, *Keeper) {
	fake.asked = make(chan *pb.KeepAliveRequest, 64)
	server := serve(t, "", &leases{keep: fake.keep})
	keeper := connect(t, server, Options{}).KeepAlive(limited(t), 0)
	t.Cleanup(keeper.Close)
	return server, keeper
}

func over(t *testing.T, lease *KeptLease) LeaseEnd {
	t.Helper()
	next(t, lease.Done())
	return lease.End()
}

func TestALeaseIsRenewedWhenAThirdOfWhatWasGrantedHasPassed(t *testing.T) {
	fake := &renewals{rows: func(_ int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
		return all(r, live(1200*time.Millisecond)), nil
	}}
	_, keeper := keeperOf(t, fake)
	lease := keeper.Add(LeaseByID("a"))
	next(t, fake.asked)
	first := time.Now()
	next(t, fake.asked) // so the first answer has arrived
	if passed := time.Since(first); passed < 300*time.Millisecond {
		t.Errorf("renewed after %v", passed)
	}
	if left := lease.Left(); left <= 0 || left > 1200*time.Millisecond {
		t.Errorf("%v left", left)
	}
	if end := lease.End(); end.State != pb.LeaseState_LEASE_STATE_LIVE || end.Err != nil {
		t.Errorf("%+v", end)
	}
}

func TestOneKeeperRenewsItsLeasesTogetherOverOneStream(t *testing.T) {
	fake := &renewals{rows: func(_ int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
		return all(r, live(300*time.Millisecond)), nil
	}}
	_, keeper := keeperOf(t, fake)
	for i := range 3 {
		keeper.Add(LeaseByID(fmt.Sprint(i)))
	}
	for len(next(t, fake.asked).Leases) < 3 {
	}
	if got := fake.streams.Load(); got != 1 {
		t.Errorf("%d streams", got)
	}
}

func TestALeaseThatIsOverIsToldAndNotRenewedAnyMore(t *testing.T) {
	fake := &renewals{rows: func(_ int, r *pb.KeepAliveRequest) (rows []*pb.RenewedLease, _ error) {
		for _, ref := range r.Leases {
			row := live(300 * time.Millisecond)
			if ref.GetLeaseId() == "done" {
				row = &pb.RenewedLease{
					State: pb.LeaseState_LEASE_STATE_DONE, Reason: pb.FailureReason_FAILURE_REASON_LEASE_RELEASED,
				}
			}
			rows = append(rows, row)
		}
		return rows, nil
	}}
	_, keeper := keeperOf(t, fake)
	kept := keeper.Add(LeaseByID("kept"))
	end := over(t, keeper.Add(LeaseByID("done")))
	if end.State != pb.LeaseState_LEASE_STATE_DONE || end.Reason != pb.FailureReason_FAILURE_REASON_LEASE_RELEASED {
		t.Errorf("%+v", end)
	}
	for len(fake.asked) > 0 {
		<-fake.asked
	}
	if request := next(t, fake.asked); len(request.Leases) != 1 || request.Leases[0].GetLeaseId() != "kept" {
		t.Errorf("%v", request)
	}
	if kept.End().State != pb.LeaseState_LEASE_STATE_LIVE {
		t.Errorf("the other lease ended: %+v", kept.End())
	}
}

func TestALeaseThatCouldNotBeRenewedIsOverWhateverIsLeftOfIt(t *testing.T) {
	for _, row := range []*pb.RenewedLease{
		{State: pb.LeaseState_LEASE_STATE_RECLAIMED, Reason: pb.FailureReason_FAILURE_REASON_LEASE_RECLAIMED},
		{State: 66, Reason: 977, Remaining: after(time.Minute)}, // from a newer server
	} {
		_, keeper := keeperOf(t, &renewals{rows: func(_ int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
			return all(r, row), nil
		}})
		if end := over(t, keeper.Add(LeaseByID("a"))); end.State != row.State || end.Reason != row.Reason {
			t.Errorf("%+v", end)
		}
	}
}

func TestALeaseExpiresInTimeThoughItsServerAsksForALongerPause(t *testing.T) {
	fake := &renewals{rows: func(n int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
		if n > 1 {
			return nil, refusal(codes.ResourceExhausted, "LIMIT_EXCEEDED", "RETRY_HERE",
				&errdetails.RetryInfo{RetryDelay: after(time.Hour)})
		}
		return all(r, live(600*time.Millisecond)), nil
	}}
	_, keeper := keeperOf(t, fake)
	if end := over(t, keeper.Add(LeaseByID("a"))); end.State != pb.LeaseState_LEASE_STATE_EXPIRED {
		t.Errorf("%+v", end)
	}
	if got := fake.requests.Load(); got != 2 {
		t.Errorf("%d requests, though the server asked for a pause", got)
	}
}

func TestAKeeperOpensAnotherStreamWhenOneBreaks(t *testing.T) {
	fake := &renewals{rows: func(n int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
		if n == 2 {
			return nil, status.Error(codes.Unavailable, "cut")
		}
		return all(r, live(3*time.Second)), nil
	}}
	server, keeper := keeperOf(t, fake)
	lease := keeper.Add(LeaseByID("a"))
	next(t, fake.asked)
	server.cut()
	next(t, fake.asked)
	next(t, fake.asked)
	if fake.streams.Load() < 3 || lease.End().State != pb.LeaseState_LEASE_STATE_LIVE {
		t.Errorf("%d streams, %+v", fake.streams.Load(), lease.End())
	}
}

func TestALeaseThatCouldNotBeRenewedInTimeCountsAsExpired(t *testing.T) {
	fake := &renewals{rows: func(_ int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
		return all(r, live(500*time.Millisecond)), nil
	}}
	server, keeper := keeperOf(t, fake)
	lease := keeper.Add(LeaseByID("a"))
	next(t, fake.asked)
	next(t, fake.asked) // so the first answer has arrived
	server.grpc.Stop()
	if end := over(t, lease); end.State != pb.LeaseState_LEASE_STATE_EXPIRED || lease.Left() != 0 {
		t.Errorf("%+v, %v left", end, lease.Left())
	}
}

func TestARefusedRenewalEndsTheLeasesWithItsError(t *testing.T) {
	fake := &renewals{rows: func(int, *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
		return nil, refusal(codes.InvalidArgument, "TTL_INVALID", "FIX_REQUEST")
	}}
	_, keeper := keeperOf(t, fake)
	end := over(t, keeper.Add(LeaseByID("a")))
	if status.Code(end.Err) != codes.InvalidArgument || end.Reason != pb.FailureReason_FAILURE_REASON_TTL_INVALID {
		t.Errorf("%+v", end)
	}
}

func TestALeaseWithoutANameHarmsNoOther(t *testing.T) {
	fake := &renewals{rows: func(_ int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
		return all(r, live(time.Minute)), nil
	}}
	_, keeper := keeperOf(t, fake)
	if end := over(t, keeper.Add(&pb.LeaseRef{})); status.Code(end.Err) != codes.InvalidArgument {
		t.Errorf("%+v", end)
	}
	keeper.Add(LeaseByGrant(&pb.Grant{Token: []byte("x")}))
	if request := next(t, fake.asked); len(request.Leases) != 1 {
		t.Errorf("%v", request)
	}
}

func TestAKeeperThatEndsTellsItsHolders(t *testing.T) {
	fake := &renewals{rows: func(_ int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
		return all(r, live(time.Minute)), nil
	}}
	_, keeper := keeperOf(t, fake)
	lease := keeper.Add(LeaseByID("a"))
	next(t, fake.asked)
	keeper.Close()
	for _, lease := range []*KeptLease{lease, keeper.Add(LeaseByID("late"))} {
		if end := over(t, lease); end.State != pb.LeaseState_LEASE_STATE_LIVE || end.Err == nil {
			t.Errorf("%+v", end)
		}
	}
}

func TestALeaseThatIsDroppedIsNotRenewedAnyMore(t *testing.T) {
	dropped := make(chan struct{})
	fake := &renewals{rows: func(n int, r *pb.KeepAliveRequest) ([]*pb.RenewedLease, error) {
		if n == 2 {
			<-dropped // the renewal is under way
		}
		return all(r, live(300*time.Millisecond)), nil
	}}
	_, keeper := keeperOf(t, fake)
	lease := keeper.Add(LeaseByID("a"))
	next(t, fake.asked)
	keeper.Drop(lease)
	close(dropped)
	if end := over(t, lease); end.State != pb.LeaseState_LEASE_STATE_LIVE || end.Err != nil {
		t.Errorf("%+v", end)
	}
	keeper.Add(LeaseByID("b"))
	for {
		if request := next(t, fake.asked); request.Leases[0].GetLeaseId() == "b" {
			if len(request.Leases) != 1 {
				t.Errorf("%v", request)
			}
			return
		}
	}
}
