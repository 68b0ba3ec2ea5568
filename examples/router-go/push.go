package main

import (
	"context"
	"errors"
)

// push lets the decode engine state where the KV goes. The prefill engine computes the prompt and sends the KV there,
// and the decode engine answers. When either engine fails, the other one is stopped and the request restarts under a
// new key.
func (r *router) push(ctx context.Context, request *request) error {
	return r.step(ctx, request, decode, "push", func(ctx context.Context, destination *engine) error {
		source := r.fleet.next(ctx, request, prefill)
		if source == nil {
			return noEngine(prefill)
		}
		defer source.begin()()
		a := r.begin(request)
		err := a.pushed(ctx, source, destination)
		r.end(ctx, a, err)
		return err
	})
}

func (a *attempt) pushed(ctx context.Context, source, destination *engine) error {
	landing, err := destination.expect(ctx, a, source)
	if err != nil {
		return err
	}
	return together(ctx,
		func(ctx context.Context) error {
			ctx, span := startStep(ctx, "prefill", source)
			err := source.push(ctx, a, destination)
			endStep(span, err)
			return err
		},
		func(ctx context.Context) error {
			ctx, span := startStep(ctx, "decode", destination)
			err := destination.land(ctx, a, landing)
			endStep(span, err)
			return err
		})
}

// together runs functions in parallel. The first failure ends the context of the others, and is returned.
func together(ctx context.Context, functions ...func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	errs := make(chan error, len(functions))
	for _, function := range functions {
		go func() {
			err := function(ctx)
			if err != nil {
				cancel(err)
			}
			errs <- err
		}()
	}
	var failed error
	for range functions {
		failed = errors.Join(failed, <-errs)
	}
	if failed == nil {
		return nil
	}
	return context.Cause(ctx)
}
