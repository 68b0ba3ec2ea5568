package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// decode reads a message that may be missing.
func decode(data json.RawMessage, into proto.Message) error {
	if len(data) == 0 {
		return nil
	}
	return protojson.Unmarshal(data, into)
}

func encoded(key string, message proto.Message) (answer, error) {
	data, err := protojson.Marshal(message)
	return answer{key: json.RawMessage(data)}, err
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func (e *executor) call(ctx context.Context, r *request) (answer, error) {
	client, err := e.client(r)
	if err != nil {
		return nil, err
	}
	method, err := method(r.Method)
	if err != nil {
		return nil, err
	}
	asked, err := messageType(method.Input())
	if err != nil {
		return nil, err
	}
	replied, err := messageType(method.Output())
	if err != nil {
		return nil, err
	}
	message, reply := asked.New().Interface(), replied.New().Interface()
	if err := decode(r.Request, message); err != nil {
		return nil, err
	}
	ctx = outgoing(ctx, r)
	if r.DeadlineS > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, seconds(r.DeadlineS))
		defer cancel()
	}
	if err := client.Conn().Invoke(ctx, path(method), message, reply); err != nil {
		return nil, err
	}
	return encoded("reply", reply)
}

func (e *executor) wait(ctx context.Context, r *request) (answer, error) {
	client, err := e.client(r)
	if err != nil {
		return nil, err
	}
	until, known := pb.WaitCondition_value["WAIT_CONDITION_"+r.Until]
	if !known && r.Until != "" {
		return nil, fmt.Errorf("no such condition: %q", r.Until)
	}
	reply, err := client.Wait(outgoing(ctx, r), r.TransferID, pb.WaitCondition(until), seconds(r.TimeoutS))
	if err != nil {
		return nil, err
	}
	told, err := encoded("transfer", reply.GetTransfer())
	told["conditionMet"] = reply.GetConditionMet()
	return told, err
}

func (e *executor) pull(ctx context.Context, r *request) (answer, error) {
	client, err := e.client(r)
	if err != nil {
		return nil, err
	}
	asked := &pb.PullBlocksRequest{}
	if err := decode(r.Request, asked); err != nil {
		return nil, err
	}
	transfer, err := client.Pull(outgoing(ctx, r), asked, seconds(r.TimeoutS))
	if err != nil {
		return nil, err
	}
	return encoded("transfer", transfer)
}

func (e *executor) move(ctx context.Context, r *request) (answer, error) {
	source, err := e.client(r)
	if err != nil {
		return nil, err
	}
	destination, err := named(e, e.clients, "server", r.To)
	if err != nil {
		return nil, err
	}
	asked := &pb.HandOver{}
	if err := decode(r.Request, asked); err != nil {
		return nil, err
	}
	moved, err := kvgrpc.Move(outgoing(ctx, r), source, destination, asked.Blocks, asked.Content, kvgrpc.Moving{
		RequestID: r.RequestID, Timeout: seconds(r.TimeoutS),
	})
	if err != nil {
		return nil, err
	}
	told, err := encoded("transfer", moved.Transfer)
	if err != nil {
		return nil, err
	}
	blocks, err := encoded("blocks", moved.Blocks)
	told["blocks"] = blocks["blocks"]
	return told, err
}

func redacted(r *request) (answer, error) {
	method, err := method(r.Method)
	if err != nil {
		return nil, err
	}
	asked, err := messageType(method.Input())
	if err != nil {
		return nil, err
	}
	message := asked.New().Interface()
	if err := decode(r.Request, message); err != nil {
		return nil, err
	}
	return answer{"text": kvgrpc.Redacted(message)}, nil
}

// keeper is a keeper with its leases in the order in which the runner named them.
type keeper struct {
	*kvgrpc.Keeper
	leases []*kvgrpc.KeptLease
}

func (e *executor) keepAlive(ctx context.Context, r *request) (answer, error) {
	client, err := e.client(r)
	if err != nil {
		return nil, err
	}
	var refs []*pb.LeaseRef
	for _, data := range r.Leases {
		ref := &pb.LeaseRef{}
		if err := decode(data, ref); err != nil {
			return nil, err
		}
		refs = append(refs, ref)
	}
	made := &keeper{Keeper: client.KeepAlive(outgoing(ctx, r), seconds(r.TTLS))}
	for _, ref := range refs {
		made.leases = append(made.leases, made.Add(ref))
	}
	put(e, e.keepers, r.Keeper, made)
	return answer{}, nil
}

func (e *executor) kept(ctx context.Context, r *request) (answer, error) {
	keeper, err := named(e, e.keepers, "keeper", r.Keeper)
	if err != nil {
		return nil, err
	}
	if r.Index < 0 || r.Index >= len(keeper.leases) {
		return nil, fmt.Errorf("keeper %q has no lease %d", r.Keeper, r.Index)
	}
	lease := keeper.leases[r.Index]
	timeout := time.NewTimer(seconds(r.TimeoutS))
	defer timeout.Stop()
	select {
	case <-lease.Done():
	case <-timeout.C:
	case <-ctx.Done():
	}
	end := lease.End()
	return answer{"state": enumName(end.State, "LEASE_STATE_")}, nil
}

func (e *executor) cleanUp(ctx context.Context, r *request) (answer, error) {
	var sides []kvgrpc.Side
	for _, asked := range r.Sides {
		client, err := named(e, e.clients, "server", asked.Server)
		if err != nil {
			return nil, err
		}
		sides = append(sides, kvgrpc.Side{
			Client: client, TransferKey: asked.TransferKey, TransferID: asked.TransferID,
			FreeAllocationIDs: asked.FreeAllocationIDs,
		})
	}
	outcomes := []string{}
	for _, result := range kvgrpc.CleanUp(outgoing(ctx, r), r.Message, sides...) {
		if result.Err != nil {
			outcomes = append(outcomes, refusalName(result.Err))
			continue
		}
		outcomes = append(outcomes, enumName(kvgrpc.Outcome(result.Response), "CANCEL_OUTCOME_"))
	}
	return answer{"outcomes": outcomes}, nil
}

// refusalName returns the reason of an error, or its code where no server made the error.
func refusalName(err error) string {
	var failed *kvgrpc.Error
	if errors.As(err, &failed) && failed.Reason != "" {
		return failed.Reason
	}
	return fmt.Sprint(describe(err)["code"])
}

// enumName returns the name of a value without its prefix, or its number where this version does not know it.
func enumName(value fmt.Stringer, prefix string) string {
	return strings.TrimPrefix(value.String(), prefix)
}
