package kvgrpc

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

const (
	// Renewals that are due within this time go along with one that is due now.
	renewTogether = 250 * time.Millisecond
	// A lease whose cap is near is renewed no more often than this.
	renewMin = 100 * time.Millisecond
	// One message has no more leases. A server takes 10,000, but no more than 4 MB, and a grant has up to 700 bytes.
	renewBatch = 5_000
)

// Keeper renews leases over one KeepAlive stream, each when a third of what was left has passed, so that two renewals
// may fail. A stream that breaks is opened again, with growing pauses.
type Keeper struct {
	ttl    *durationpb.Duration
	stream exchange[pb.KeepAliveRequest, pb.KeepAliveResponse]
	usual  time.Duration // limit of one exchange
	news   chan struct{} // a lease was added
	cancel context.CancelFunc
	ended  chan struct{}
	// Until then no stream is tried. The loop's own.
	notBefore time.Time

	mu   sync.Mutex // guards what follows, and the fields of the leases
	held map[*KeptLease]struct{}
	over error // why nothing is renewed any more
}

// KeepAlive starts a keeper that has no lease yet. Renewals ask for ttl; 0 asks for that which each lease was granted
// with. The keeper ends with ctx or by Close; the leases then live on until their time is over.
func (c *Client) KeepAlive(ctx context.Context, ttl time.Duration) *Keeper {
	ctx, cancel := c.bound(ctx)
	keeper := &Keeper{
		usual:  c.timeout,
		news:   make(chan struct{}, 1),
		cancel: cancel,
		ended:  make(chan struct{}),
		held:   map[*KeptLease]struct{}{},
	}
	keeper.stream.ctx, keeper.stream.open = ctx, c.Leases.KeepAlive
	if ttl != 0 {
		keeper.ttl = durationpb.New(ttl)
	}
	go keeper.run(ctx)
	return keeper
}

// Add renews a lease from now on; the first time at once.
func (k *Keeper) Add(ref *pb.LeaseRef) *KeptLease {
	lease := &KeptLease{ref: ref, keeper: k, done: make(chan struct{}), due: time.Now()}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case ref.GetBy() == nil:
		// At the server it would end the stream, for all leases.
		lease.end(LeaseEnd{Err: &Error{Code: codes.InvalidArgument, Message: "a lease is named by its id or a grant"}})
	case k.over != nil:
		lease.end(LeaseEnd{State: pb.LeaseState_LEASE_STATE_LIVE, Err: k.over})
	default:
		k.held[lease] = struct{}{}
		select {
		case k.news <- struct{}{}:
		default:
		}
	}
	return lease
}

// Drop renews a lease no more. It lives on until its time is over.
func (k *Keeper) Drop(lease *KeptLease) {
	k.mu.Lock()
	defer k.mu.Unlock()
	lease.end(LeaseEnd{State: pb.LeaseState_LEASE_STATE_LIVE})
}

// Close stops renewing. It ends no lease.
func (k *Keeper) Close() {
	k.cancel()
	<-k.ended
}

func (k *Keeper) run(ctx context.Context) {
	defer close(k.ended)
	defer k.stop(ctx)
	var pauses pauses
	for ctx.Err() == nil {
		batch, limit := k.due(ctx)
		if len(batch) == 0 {
			continue
		}
		request := &pb.KeepAliveRequest{Ttl: k.ttl}
		for _, lease := range batch {
			request.Leases = append(request.Leases, lease.ref)
		}
		sent := time.Now()
		asking, cancel := context.WithTimeout(ctx, limit)
		reply, err := k.stream.ask(asking, request)
		cancel()
		if err == nil && len(reply.Leases) != len(batch) {
			k.stream.close()
			err = &Error{Code: codes.Internal, Message: fmt.Sprintf("%d leases, %d rows", len(batch), len(reply.Leases))}
		}
		switch {
		case err == nil:
			pauses.longest = 0
			k.answered(batch, reply.Leases, sent)
		case brokenOrFull(err):
			k.notBefore = time.Now().Add(pauses.next(retryDelay(err)))
		default:
			k.refused(batch, err)
		}
	}
}

// due waits until a lease is to be renewed, and returns those that go together, with the time that their answer may
// take: half of what is left to the first of them. Leases whose time is over are ended, also in a pause after a failure.
// Nothing is due when ctx ends, a lease was added or one is over.
func (k *Keeper) due(ctx context.Context) (batch []*KeptLease, limit time.Duration) {
	k.mu.Lock()
	now := time.Now()
	limit = k.usual
	next := now.Add(time.Hour)
	for lease := range k.held {
		if !lease.until.IsZero() && !now.Before(lease.until) {
			// Another holder may have renewed it. This one must not rely on that.
			lease.end(LeaseEnd{State: pb.LeaseState_LEASE_STATE_EXPIRED, Reason: pb.FailureReason_FAILURE_REASON_LEASE_EXPIRED})
			continue
		}
		attempt := later(lease.due, k.notBefore)
		if !lease.until.IsZero() && lease.until.Before(attempt) {
			attempt = lease.until
		}
		if attempt.Before(next) {
			next = attempt
		}
		if lease.due.Before(now.Add(renewTogether)) && len(batch) < renewBatch {
			batch = append(batch, lease)
			if !lease.until.IsZero() {
				limit = min(limit, max(lease.until.Sub(now)/2, renewMin))
			}
		}
	}
	k.mu.Unlock()
	if !next.After(now) {
		return batch, limit
	}
	timer := time.NewTimer(next.Sub(now))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-k.news:
	}
	return nil, 0
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (k *Keeper) answered(batch []*KeptLease, rows []*pb.RenewedLease, sent time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, lease := range batch {
		left, reason := rows[i].GetRemaining().AsDuration(), rows[i].GetReason()
		if left <= 0 || reason != pb.FailureReason_FAILURE_REASON_UNSPECIFIED {
			lease.end(LeaseEnd{State: rows[i].GetState(), Reason: reason})
			continue
		}
		// Counted from when it was sent: the holder never believes in a lease longer than the server does.
		lease.until = sent.Add(left)
		lease.due = sent.Add(max(left/3, renewMin))
	}
}

// refused ends leases whose renewal the server does not take at all.
func (k *Keeper) refused(batch []*KeptLease, err error) {
	end := LeaseEnd{Err: err}
	if failed, ok := err.(*Error); ok {
		end.Reason = failed.FailureReason()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, lease := range batch {
		lease.end(end)
	}
}

func (k *Keeper) stop(ctx context.Context) {
	k.stream.close()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.over = overError(ctx)
	for lease := range k.held {
		lease.end(LeaseEnd{State: pb.LeaseState_LEASE_STATE_LIVE, Err: k.over})
	}
}

// KeptLease is a lease that a keeper renews.
type KeptLease struct {
	ref    *pb.LeaseRef
	keeper *Keeper
	done   chan struct{}
	until  time.Time // what the server granted; zero before the first answer
	due    time.Time
	ending LeaseEnd
}

// LeaseEnd is why a lease is renewed no more.
type LeaseEnd struct {
	// State of the lease: DONE says that its consumers have their KV, UNSPECIFIED that the server does not know it. LIVE
	// says that it was dropped, or that its keeper has ended.
	State pb.LeaseState
	// Reason why it could not be renewed.
	Reason pb.FailureReason
	// Err is set where it was not the lease that ended, but its renewal.
	Err error
}

// Done is closed when the lease is renewed no more. See End.
func (l *KeptLease) Done() <-chan struct{} { return l.done }

// End says why the lease is renewed no more; its state is LIVE before that.
func (l *KeptLease) End() LeaseEnd {
	l.keeper.mu.Lock()
	defer l.keeper.mu.Unlock()
	select {
	case <-l.done:
		return l.ending
	default:
		return LeaseEnd{State: pb.LeaseState_LEASE_STATE_LIVE}
	}
}

// Left is how long the lease lives for certain: 0 before the first renewal was answered, and when it is over.
func (l *KeptLease) Left() time.Duration {
	l.keeper.mu.Lock()
	defer l.keeper.mu.Unlock()
	select {
	case <-l.done:
		return 0
	default:
		return max(time.Until(l.until), 0) // of a zero `until`: long over
	}
}

// end is called with the keeper's lock. Only the first end counts: a lease may be dropped while it is renewed.
func (l *KeptLease) end(why LeaseEnd) {
	select {
	case <-l.done:
	default:
		delete(l.keeper.held, l)
		l.ending = why
		close(l.done)
	}
}
