package main

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

const (
	pauseMin = 100 * time.Millisecond
	pauseMax = 5 * time.Second
)

// step does one step of a request at an engine of a role, and repeats it as its failures say: at the same engine after
// the delay, or at another one. It gives up after the allowed number of tries, or once the client has got a part of its
// answer. RECOMPUTE ends the tries of a decode engine's step. After RECOMPUTE a prefill is tried at another engine,
// because any computation of the prompt will do.
func (r *router) step(
	ctx context.Context, request *request, role role, name string, do func(context.Context, *engine) error,
) error {
	var e *engine
	var err error
	pause := pauseMin
	for range r.options.tries {
		if e == nil || !e.takesWork() {
			if e = r.fleet.next(ctx, request, role); e == nil {
				return errors.Join(err, noEngine(role))
			}
		}
		if err = r.try(ctx, request, e, name, do); err == nil || ctx.Err() != nil || request.answer.begun() {
			return err
		}
		var f *failure
		if !errors.As(err, &f) || f.at == nil {
			return err
		}
		slog.Info("a step failed", "request", request.id, "step", name, "next", f.next, "error", err)
		switch {
		case f.next == retryHere:
			if !sleep(ctx, max(f.delay, pause)) {
				return ctx.Err()
			}
			pause = min(2*pause, pauseMax)
		case f.next == retryOther, f.next == recompute && role == prefill:
			request.avoid[f.at] = true
			e = nil
			if role == prefill {
				clear(request.pair) // nothing binds the request to the other engine yet
			}
		default:
			return err
		}
	}
	return err
}

// try does a step once, with its span.
func (r *router) try(
	ctx context.Context, request *request, e *engine, name string, do func(context.Context, *engine) error,
) error {
	defer e.begin()()
	ctx, span := startStep(ctx, name, e)
	err := do(ctx, e)
	endStep(span, err)
	return err
}

// sleep returns false where the context ends first.
func sleep(ctx context.Context, duration time.Duration) bool {
	timer := time.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
