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

// take pauses, for no less than the server asked for. It fails when the context ends first.
func (p *pauses) take(ctx context.Context, asked time.Duration) error {
	p.longest = min(max(2*p.longest, pauseMin), pauseMax)
	jittered := p.longest/2 + rand.N(p.longest/2+1)
	timer := time.NewTimer(max(jittered, asked))
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
