package main

import (
	"encoding/base64"
	"encoding/json"
	"maps"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// params is the object `kv_transfer_params`, which engines with their own scheduler read and write. The router relays
// unread what an engine puts into it.
type params map[string]json.RawMessage

// handOver is what a prefill engine gives the decode engine: a READ grant, as a message or within params.
type handOver struct {
	grant  *pb.Grant
	params params
}

// landing is the destination of a push. For a driven engine it is the reservation of its blocks. A relayed engine
// reserves by itself, so there it is the engine that the push comes from.
type landing struct {
	transferID string
	blocks     *pb.Blocks
	source     *engine
}

var (
	toPrefill = params{"do_remote_decode": json.RawMessage("true"), "do_remote_prefill": json.RawMessage("false")}
	toDecode  = params{"do_remote_decode": json.RawMessage("false"), "do_remote_prefill": json.RawMessage("true")}
)

// with returns the object with the attempt's intent added.
func (p params) with(intent *pb.Intent) (params, error) {
	encoded, err := protojson.Marshal(intent)
	if err != nil {
		return nil, err
	}
	made := maps.Clone(p)
	made["kvgrpc_intent"] = encoded
	return made, nil
}

// intent returns what both engines are told about an attempt.
func (a *attempt) intent(mode pb.TransferMode) *pb.Intent {
	intent := &pb.Intent{TransferKey: a.key, RequestId: a.id, Mode: mode, Ttl: durationpb.New(a.ttl)}
	if mode == pb.TransferMode_TRANSFER_MODE_PULL {
		// A decode engine that fails is replaced by another one with the same grant. Without another one the router
		// cancels.
		intent.OnAbort = pb.OnAbort_ON_ABORT_KEEP
	}
	return intent
}

// forRelay returns the hand-over as params, whichever kind of engine it is from.
func (h *handOver) forRelay() (params, error) {
	if h.params != nil {
		return h.params, nil
	}
	token, err := json.Marshal(base64.URLEncoding.EncodeToString(h.grant.Token))
	if err != nil {
		return nil, err
	}
	made := maps.Clone(toDecode)
	made["kvgrpc_grant"] = token
	return made, nil
}

// forDrive returns the hand-over as a grant. Only the token counts of its fields, and only its issuer can read the
// token.
func (h *handOver) forDrive() (*pb.Grant, error) {
	if h.grant != nil {
		return h.grant, nil
	}
	var text string
	if err := json.Unmarshal(h.params["kvgrpc_grant"], &text); err != nil {
		return nil, err
	}
	// The text may use either base64 alphabet, with or without padding.
	text = strings.NewReplacer("+", "-", "/", "_").Replace(strings.TrimRight(text, "="))
	token, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		return nil, err
	}
	return &pb.Grant{Token: token}, nil
}
