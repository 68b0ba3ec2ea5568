package main

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// relayed is an engine with its own scheduler, such as vLLM with kvgrpc's connector. It moves KV by itself. The router
// puts an intent into its request, carries the answer of one engine to the other, and asks the leads.
type relayed struct{ *engine }

// lengths are the fields for the length of the answer, which only the decode engine gets.
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
	// Named tensors have no grant. They have a key and an address, which the decode engine reads.
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

// computePrompt asks for one token and discards it. It returns what the engine has for the decode engine.
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
	// The engine reserves its blocks when it gets its request. Its lead then registers the push at the source's lead.
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

// complete lets the engine answer the client. The lead is asked why KV did not arrive, as no HTTP status says so.
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

// look records the state of the attempt's transfer in its own span, because the span of the step may end earlier.
func (e *relayed) look(ctx context.Context, a *attempt) {
	ctx, span := startStep(ctx, "look", e.engine)
	defer span.End()
	observe(ctx, e.received(ctx, a))
}

// explain returns why an engine did not answer: the lead's account of the transfer, if the transfer failed.
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

// received returns the attempt's latest transfer to this engine, or nil where none is known.
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
