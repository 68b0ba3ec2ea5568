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
	// Renewals that are due within this time are sent with one that is due now.
	renewTogether = 250 * time.Millisecond
	// A lease whose cap is near is renewed no more often than this.
	renewMin = 100 * time.Millisecond
	// One message has at most so many leases. A server takes 10,000, but at most 4 MB, and a grant has up to 700 bytes.
	renewBatch = 5_000
)

// Keeper renews leases over one KeepAlive stream. It renews each lease when a third of its remaining time has passed,
// so that two renewals may fail. A stream that breaks is opened again, after growing pauses.
type Keeper struct {
	ttl    *durationpb.Duration
	stream exchange[pb.KeepAliveRequest, pb.KeepAliveResponse]
	usual  time.Duration // time limit of one exchange
	news   chan struct{} // a lease was added
	cancel context.CancelFunc
	ended  chan struct{}
	// No stream is tried before this time. Only the loop uses it.
	notBefore time.Time

	mu   sync.Mutex // guards the fields below, and the fields of the leases
	held map[*KeptLease]struct{}
	over error // why no lease is renewed any more
}

// KeepAlive starts a keeper that has no lease yet. Renewals ask for ttl; 0 asks for the TTL that each lease was granted
// with. The keeper ends with ctx or by Close. The leases then live until their time is over.
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

// Add renews a lease from now on. The first renewal is immediate.
func (k *Keeper) Add(ref *pb.LeaseRef) *KeptLease {
	lease := &KeptLease{ref: ref, keeper: k, done: make(chan struct{}), due: time.Now()}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case ref.GetBy() == nil:
		// The server would end the stream for it, and with the stream the renewals of all leases.
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

// Drop stops renewing a lease. The lease lives until its time is over.
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

// due waits until a lease must be renewed. It returns the leases to renew together, and the time limit of their answer:
// half of the time that is left to the lease that ends first. It ends leases whose time is over, also in the pause
// after a failure. It returns no leases when ctx ends, when a lease was added, or when the time of a lease is over.
func (k *Keeper) due(ctx context.Context) (batch []*KeptLease, limit time.Duration) {
	k.mu.Lock()
	now := time.Now()
	limit = k.usual
	next := now.Add(time.Hour)
	for lease := range k.held {
		if !lease.until.IsZero() && !now.Before(lease.until) {
			// Another holder may have renewed the lease. This holder must not rely on that.
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
		// The time counts from when the renewal was sent, so that the holder never relies on a lease longer than the
		// server.
		lease.until = sent.Add(left)
		lease.due = sent.Add(max(left/3, renewMin))
	}
}

// refused ends leases whose renewal the server refuses as a whole.
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
	until  time.Time // end of what the server granted; zero before the first answer
	due    time.Time
	ending LeaseEnd
}

// LeaseEnd is why a lease is not renewed any more.
type LeaseEnd struct {
	// State is the state of the lease. DONE says that its consumers have their KV. UNSPECIFIED says that the server
	// does not know the lease. LIVE says that the lease was dropped, or that its keeper has ended.
	State pb.LeaseState
	// Reason is why the lease could not be renewed.
	Reason pb.FailureReason
	// Err is set where the renewals ended and not the lease.
	Err error
}

// Done returns a channel that is closed when the lease is not renewed any more. See End.
func (l *KeptLease) Done() <-chan struct{} { return l.done }

// End returns why the lease is not renewed any more. Before that the state is LIVE.
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

// Left returns how long the lease is sure to live: 0 before the first answer to a renewal, and after its end.
func (l *KeptLease) Left() time.Duration {
	l.keeper.mu.Lock()
	defer l.keeper.mu.Unlock()
	select {
	case <-l.done:
		return 0
	default:
		return max(time.Until(l.until), 0) // a zero `until` is long over
	}
}

// end must be called with the keeper's lock held. Only the first end counts, as a lease may be dropped while it renews.
func (l *KeptLease) end(why LeaseEnd) {
	select {
	case <-l.done:
	default:
		delete(l.keeper.held, l)
		l.ending = why
		close(l.done)
	}
}
