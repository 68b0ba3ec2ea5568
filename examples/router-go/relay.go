package main

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// relayed is an engine with a scheduler of its own, such as vLLM with kvgrpc's connector. It moves KV by itself: the
// router puts an intent into its request, carries what the one engine answers to the other, and looks at leads.
type relayed struct{ *engine }

// lengths of the answer are the decode engine's matter.
var lengths = []string{"max_tokens", "max_completion_tokens", "min_tokens", "stream_options", "n"}

func (e *relayed) prefill(ctx context.Context, a *attempt) (*handOver, error) {
	params, err := toPrefill.with(a.intent(pb.TransferMode_TRANSFER_MODE_PULL))
	if err != nil {
		return nil, err
	}
	said, err := e.computePrompt(ctx, a, params)
	if err != nil {
		return nil, err
	}
	// Named tensors have no grant: a key and an address, which the decode engine reads.
	if len(said["kvgrpc_grant"]) == 0 && len(said["kvgrpc_intent"]) == 0 {
		return nil, &failure{at: e.engine, what: "prefill", next: retryOther, err: errors.New("no grant in its answer")}
	}
	return &handOver{params: said}, nil
}

func (e *relayed) push(ctx context.Context, a *attempt, destination *engine) error {
	intent := a.intent(pb.TransferMode_TRANSFER_MODE_PUSH)
	intent.Peer = &pb.PeerAddress{Address: destination.lead} // where named tensors are put
	params, err := toPrefill.with(intent)
	if err != nil {
		return err
	}
	_, err = e.computePrompt(ctx, a, params)
	return err
}

// computePrompt asks for one token, which is thrown away, and returns what the engine has for the other one.
func (e *relayed) computePrompt(ctx context.Context, a *attempt, given params) (params, error) {
	body, err := a.with(map[string]any{"max_tokens": 1, "stream": false, "kv_transfer_params": given}, lengths...)
	if err != nil {
		return nil, err
	}
	a.tell(e.engine)
	reply, err := post(ctx, e.engine, a.path, a, body)
	if err != nil {
		return nil, err
	}
	defer reply.Body.Close()
	var said struct {
		Params params `json:"kv_transfer_params"`
	}
	if err := json.NewDecoder(reply.Body).Decode(&said); err != nil {
		return nil, unanswered(ctx, e.engine, a.path, err)
	}
	return said.Params, nil
}

func (e *relayed) decode(ctx context.Context, a *attempt, handed *handOver) error {
	given, err := handed.forRelay()
	if err != nil {
		return err
	}
	params, err := given.with(a.intent(pb.TransferMode_TRANSFER_MODE_PULL))
	if err != nil {
		return err
	}
	return e.complete(ctx, a, params)
}

func (e *relayed) expect(_ context.Context, a *attempt, source *engine) (*landing, error) {
	// The engine reserves its blocks when it gets its request, and its lead registers the push at the source's.
	a.tell(source)
	return &landing{source: source}, nil
}

func (e *relayed) land(ctx context.Context, a *attempt, landing *landing) error {
	intent := a.intent(pb.TransferMode_TRANSFER_MODE_PUSH)
	intent.Peer = &pb.PeerAddress{Address: landing.source.lead}
	params, err := toDecode.with(intent)
	if err != nil {
		return err
	}
	return e.complete(ctx, a, params)
}

func (e *relayed) alone(ctx context.Context, a *attempt) error { return e.complete(ctx, a, nil) }

// complete has the engine answer the client. Why KV did not come is not in an HTTP status: the lead is asked.
func (e *relayed) complete(ctx context.Context, a *attempt, params params) error {
	fields := map[string]any{}
	if params != nil {
		fields["kv_transfer_params"] = params
	}
	body, err := a.with(fields)
	if err != nil {
		return err
	}
	a.tell(e.engine)
	reply, err := post(ctx, e.engine, a.path, a, body)
	if err != nil {
		return e.explain(ctx, a, err)
	}
	defer reply.Body.Close()
	err = a.answer.relay(reply, func() {
		// The KV is there once the first token is.
		if params != nil {
			a.later(func() { e.look(context.WithoutCancel(ctx), a) })
		}
	})
	if err != nil {
		return e.explain(ctx, a, unanswered(ctx, e.engine, a.path, err))
	}
	return nil
}

// look notes how the attempt's transfer is, in a span of its own: that of the step may be over before.
func (e *relayed) look(ctx context.Context, a *attempt) {
	ctx, span := startStep(ctx, "look", e.engine)
	defer span.End()
	observe(ctx, e.received(ctx, a))
}

// explain is why an engine did not answer: what its lead says of the transfer, if that failed.
func (e *relayed) explain(ctx context.Context, a *attempt, err error) error {
	if nextOf(err) != retryOther {
		return err
	}
	transfer := e.received(ctx, a)
	if transfer == nil || !kvgrpc.IsOver(transfer) || kvgrpc.Succeeded(transfer) {
		return err
	}
	observe(ctx, transfer)
	return ended(e.engine, transfer)
}

// received is the attempt's latest transfer to this engine, or nil where none is known.
func (e *relayed) received(ctx context.Context, a *attempt) *pb.Transfer {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	reply, err := e.client.Transfers.ListTransfers(ctx, &pb.ListTransfersRequest{
		Filter:   &pb.TransferFilter{RequestId: a.id, Direction: pb.Direction_DIRECTION_RECEIVE},
		PageSize: 1, // the newest comes first
	})
	if err != nil || len(reply.Transfers) == 0 {
		return nil
	}
	return reply.Transfers[0]
}
