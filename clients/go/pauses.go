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

// pauses between attempts grow, with jitter, so that the clients of one server do not all come back at once.
type pauses struct{ longest time.Duration }

// next returns the next pause, which is at least as long as the server asked for.
func (p *pauses) next(asked time.Duration) time.Duration {
	p.longest = min(max(2*p.longest, pauseMin), pauseMax)
	return max(p.longest/2+rand.N(p.longest/2+1), asked)
}

// take waits for the next pause. It fails when the context ends first.
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

// after records how long a stream lasted before it broke. Only a stream that lasted long counts as a recovery: then the
// pauses start over.
func (p *pauses) after(stood time.Duration) {
	if stood >= pauseMax {
		p.longest = 0
	}
}
