package main

import "context"

// pull lets the prefill engine compute the prompt and hand it over. A decode engine pulls the KV and answers. A decode
// engine that fails is replaced by another one with the same grant.
func (r *router) pull(ctx context.Context, request *request) error {
	var a *attempt
	var handed *handOver
	err := r.step(ctx, request, prefill, "prefill", func(ctx context.Context, e *engine) (err error) {
		a = r.begin(request)
		if handed, err = e.prefill(ctx, a); err != nil {
			r.end(ctx, a, err)
		}
		return err
	})
	if err != nil {
		return err
	}
	err = r.step(ctx, request, decode, "decode", func(ctx context.Context, e *engine) error {
		err := e.decode(ctx, a, handed)
		a.abandon(e, err != nil)
		return err
	})
	r.end(ctx, a, err)
	return err
}

// alone lets a decode engine compute everything. It is the fallback when the KV is lost.
func (r *router) alone(ctx context.Context, request *request) error {
	return r.step(ctx, request, decode, "recompute", func(ctx context.Context, e *engine) error {
		a := r.begin(request)
		err := e.alone(ctx, a)
		r.end(ctx, a, err)
		return err
	})
}
