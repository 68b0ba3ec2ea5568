package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"reflect"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// fake plays the part of a server.
type fake struct {
	pb.UnimplementedTransferServiceServer
	pb.UnimplementedLeaseServiceServer
	pb.UnimplementedHandshakeServiceServer
}

func (fake) GetTransfer(_ context.Context, r *pb.GetTransferRequest) (*pb.GetTransferResponse, error) {
	if r.TransferId == "none" {
		refused, _ := status.New(codes.NotFound, "no such").WithDetails(
			&errdetails.ErrorInfo{Reason: "TRANSFER_NOT_FOUND", Domain: "kvgrpc.dev", Metadata: map[string]string{
				"next": "RECOMPUTE", "engine_id": "P", "incarnation": "7", "group": "0"}},
			&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "transfer_id", Description: "gone"}}},
			&errdetails.RetryInfo{RetryDelay: durationpb.New(500e6)})
		return nil, refused.Err()
	}
	return &pb.GetTransferResponse{Transfer: &pb.Transfer{TransferId: r.TransferId, State: 99}}, nil
}

func (fake) WaitTransfer(_ context.Context, r *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
	return &pb.WaitTransferResponse{ConditionMet: true, Transfer: &pb.Transfer{TransferId: r.TransferId}}, nil
}

func (fake) WatchTransfers(r *pb.WatchTransfersRequest, stream grpc.ServerStreamingServer[pb.WatchTransfersResponse]) error {
	if r.GetFilter().GetRequestId() == "refused" {
		return status.Error(codes.InvalidArgument, "no")
	}
	stream.Send(&pb.WatchTransfersResponse{Header: &pb.ResponseHeader{EventSeq: r.AfterEventSeq + 1, Incarnation: 7}})
	if r.GetFilter().GetRequestId() == "lasting" {
		<-stream.Context().Done()
	}
	return nil
}

func (fake) WatchEngine(_ *pb.WatchEngineRequest, stream grpc.ServerStreamingServer[pb.WatchEngineResponse]) error {
	stream.Send(&pb.WatchEngineResponse{Status: &pb.EngineStatus{LeaseCount: 2}})
	<-stream.Context().Done()
	return nil
}

func (fake) CancelTransfer(_ context.Context, r *pb.CancelTransferRequest) (*pb.CancelTransferResponse, error) {
	if string(r.GetTransferKey()) != "0123456789abcdef" {
		return nil, status.Error(codes.NotFound, "no")
	}
	return &pb.CancelTransferResponse{Outcome: pb.CancelOutcome_CANCEL_OUTCOME_TOMBSTONED}, nil
}

func (fake) KeepAlive(stream grpc.BidiStreamingServer[pb.KeepAliveRequest, pb.KeepAliveResponse]) error {
	stream.SendHeader(nil)
	for {
		r, err := stream.Recv()
		if err != nil {
			return nil
		}
		reply := &pb.KeepAliveResponse{}
		for _, ref := range r.Leases {
			row := &pb.RenewedLease{State: pb.LeaseState_LEASE_STATE_LIVE, Remaining: durationpb.New(60e9)}
			if ref.GetLeaseId() == "done" {
				row = &pb.RenewedLease{State: pb.LeaseState_LEASE_STATE_DONE}
			}
			reply.Leases = append(reply.Leases, row)
		}
		stream.Send(reply)
	}
}

// runner plays the part of the runner.
type runner struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader
	ids int
}

func start(t *testing.T) (*runner, string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pb.RegisterTransferServiceServer(server, fake{})
	pb.RegisterLeaseServiceServer(server, fake{})
	pb.RegisterHandshakeServiceServer(server, fake{})
	go server.Serve(listener)
	t.Cleanup(server.Stop)

	inRead, in := io.Pipe()
	out, outWrite := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- newExecutor().serve(inRead, outWrite) }()
	t.Cleanup(func() {
		in.Close()
		go io.Copy(io.Discard, out)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return &runner{t: t, in: in, out: bufio.NewReader(out)}, listener.Addr().String()
}

// ask sends a request and compares the answer with `want`, a JSON object with its `ok` or `error`.
func (r *runner) ask(request, want string) {
	r.t.Helper()
	r.ids++
	fmt.Fprintf(r.in, `{"id": %d, %s}`+"\n", r.ids, request)
	line, err := r.out.ReadString('\n')
	if err != nil {
		r.t.Fatal(err)
	}
	var got, wanted map[string]any
	json.Unmarshal([]byte(line), &got)
	if err := json.Unmarshal([]byte(want), &wanted); err != nil {
		r.t.Fatal(err)
	}
	wanted["id"] = float64(r.ids)
	if done, ok := got["ok"].(map[string]any); ok {
		if metadata, ok := done["metadata"].(map[string]any); ok {
			delete(metadata, "content-type")
		}
	}
	if !reflect.DeepEqual(got, wanted) {
		r.t.Errorf("%s\n got %s want %s", request, line, want)
	}
}

func TestTheExecutorDoesWhatItsProtocolSays(t *testing.T) {
	r, address := start(t)
	for _, step := range [][2]string{
		{`"op": "connect", "server": "P", "address": "` + address + `"`, `{"ok": {}}`},
		{`"op": "call", "server": "P", "method": "kvgrpc.v1.TransferService/GetTransfer", "request": {"transferId": "t"}, "metadata": {"traceparent": "x"}`,
			`{"ok": {"reply": {"transfer": {"transferId": "t", "state": 99}}}}`},
		{`"op": "call", "server": "P", "method": "kvgrpc.v1.TransferService/GetTransfer", "request": {"transferId": "none"}`,
			`{"error": {"code": "NOT_FOUND", "reason": "TRANSFER_NOT_FOUND", "message": "no such", "next": "RECOMPUTE", "engineId": "P",
			  "incarnation": "7", "metadata": {"group": "0"}, "violations": [{"field": "transfer_id", "description": "gone"}], "retryDelayS": 0.5}}`},
		{`"op": "wait", "server": "P", "transferId": "t", "until": "RETURNED", "timeoutS": 100`,
			`{"ok": {"transfer": {"transferId": "t"}, "conditionMet": true}}`},
		{`"op": "open", "server": "P", "stream": "s", "method": "kvgrpc.v1.TransferService/WatchTransfers", "request": {"afterEventSeq": "4"}`,
			`{"ok": {"metadata": {}}}`},
		{`"op": "next", "stream": "s", "timeoutS": 5`, `{"ok": {"message": {"header": {"eventSeq": "5", "incarnation": "7"}}}}`},
		{`"op": "next", "stream": "s", "timeoutS": 5`, `{"ok": {"end": true}}`},
		{`"op": "open", "server": "P", "stream": "s", "method": "kvgrpc.v1.TransferService/WatchTransfers", "request": {"filter": {"requestId": "refused"}}`,
			`{"error": {"code": "INVALID_ARGUMENT", "reason": "", "message": "no", "next": "", "engineId": "", "incarnation": "0", "metadata": {}, "violations": []}}`},
		{`"op": "open", "server": "P", "stream": "k", "method": "kvgrpc.v1.LeaseService/KeepAlive"`, `{"ok": {"metadata": {}}}`},
		{`"op": "send", "stream": "k", "request": {"leases": [{"leaseId": "done"}]}`, `{"ok": {}}`},
		{`"op": "next", "stream": "k", "timeoutS": 5`, `{"ok": {"message": {"leases": [{"state": "LEASE_STATE_DONE"}]}}}`},
		{`"op": "next", "stream": "k", "timeoutS": 0.01`, `{"ok": {"timeout": true}}`},
		{`"op": "finish", "stream": "k"`, `{"ok": {}}`},
		{`"op": "next", "stream": "k", "timeoutS": 5`, `{"ok": {"end": true}}`},
		{`"op": "watch", "server": "P", "stream": "w", "filter": {"requestId": "lasting"}, "after": {"eventSeq": "8", "incarnation": "7"}`, `{"ok": {}}`},
		{`"op": "next", "stream": "w", "timeoutS": 5`, `{"ok": {"message": {"header": {"eventSeq": "9", "incarnation": "7"}}}}`},
		{`"op": "cancel", "stream": "w"`, `{"ok": {}}`},
		{`"op": "watchEngine", "server": "P", "stream": "e"`, `{"ok": {}}`},
		{`"op": "next", "stream": "e", "timeoutS": 5`, `{"ok": {"message": {"status": {"leaseCount": 2}}}}`},
		{`"op": "keepAlive", "server": "P", "keeper": "K", "leases": [{"leaseId": "a"}, {"leaseId": "done"}], "ttlS": 30`, `{"ok": {}}`},
		{`"op": "kept", "keeper": "K", "index": 1, "timeoutS": 5`, `{"ok": {"state": "DONE"}}`},
		{`"op": "kept", "keeper": "K", "index": 0, "timeoutS": 0`, `{"ok": {"state": "LIVE"}}`},
		{`"op": "stopKeeping", "keeper": "K"`, `{"ok": {}}`},
		{`"op": "cleanUp", "message": "m", "sides": [{"server": "P", "transferKey": "MDEyMzQ1Njc4OWFiY2RlZg=="}, {"server": "P", "transferId": "t"}]`,
			`{"ok": {"outcomes": ["TOMBSTONED", "NOT_FOUND"]}}`},
		{`"op": "close", "server": "P"`, `{"ok": {}}`},
		{`"op": "fly"`, `{"error": {"code": "EXECUTOR", "message": "no such op: \"fly\""}}`},
	} {
		r.ask(step[0], step[1])
	}
}
