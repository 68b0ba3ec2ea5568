package kvgrpc

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	pauseMin = 100 * time.Millisecond
	pauseMax = 2 * time.Second
)

// pauses between attempts grow, with jitter, so that clients of one server do not come back all at once.
type pauses struct{ longest time.Duration }

// next is the next pause: no less than the server asked for.
func (p *pauses) next(asked time.Duration) time.Duration {
	p.longest = min(max(2*p.longest, pauseMin), pauseMax)
	return max(p.longest/2+rand.N(p.longest/2+1), asked)
}

// take sits the next pause out. It fails when the context ends first.
func (p *pauses) take(ctx context.Context, asked time.Duration) error {
	timer := time.NewTimer(p.next(asked))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// after tells how long a stream stood that broke. Only one that lasted counts as a recovery: the pauses start over.
func (p *pauses) after(stood time.Duration) {
	if stood >= pauseMax {
		p.longest = 0
	}
}
