package kvgrpc

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// failure returns the typed error of a call that the server ends with err.
func failure(t *testing.T, err error) *Error {
	t.Helper()
	server := serve(t, "", &transfers{
		get: func(context.Context, *pb.GetTransferRequest) (*pb.GetTransferResponse, error) { return nil, err },
	})
	_, err = connect(t, server, Options{}).Transfers.GetTransfer(limited(t), &pb.GetTransferRequest{})
	var failed *Error
	if !errors.As(err, &failed) {
		t.Fatalf("not a typed error: %v", err)
	}
	return failed
}

func TestAnErrorHoldsAllThatTheServerSays(t *testing.T) {
	got := failure(t, refusal(codes.OutOfRange, "BLOCK_OUT_OF_RANGE", "FIX_REQUEST",
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "blocks", Description: "too high"}}},
		&errdetails.RetryInfo{RetryDelay: after(1500 * time.Millisecond)}))
	if got.Code != codes.OutOfRange || got.Reason != "BLOCK_OUT_OF_RANGE" || got.Next != "FIX_REQUEST" || got.Message != "no" {
		t.Errorf("%+v", got)
	}
	if got.EngineID != "P" || got.Incarnation != 7 || len(got.Metadata) != 0 {
		t.Errorf("%+v", got)
	}
	if got.Violations[0] != (Violation{"blocks", "too high"}) || *got.RetryDelay != 1500*time.Millisecond {
		t.Errorf("%+v", got)
	}
	if got.NextStep() != pb.NextStep_NEXT_STEP_FIX_REQUEST || status.Code(got) != codes.OutOfRange {
		t.Errorf("%v %v", got.NextStep(), status.Code(got))
	}
	where := " (TransferService/GetTransfer at " + got.Address + ")"
	if text := got.Error(); text != "OUT_OF_RANGE BLOCK_OUT_OF_RANGE: no; blocks: too high"+where {
		t.Error(text)
	}
}

func TestNothingIsSaidTwice(t *testing.T) {
	wrong := []Violation{{"blocks", "too high"}, {"ttl", "too long"}}
	for message, want := range map[string]string{
		"no":                                     "no; blocks: too high; ttl: too long",
		"R: no":                                  "no; blocks: too high; ttl: too long",
		"R: no; blocks: too high; ttl: too long": "no; blocks: too high; ttl: too long",
		"R: blocks: too high; ttl: too long":     "blocks: too high; ttl: too long",
		"too high":                               "blocks: too high; ttl: too long",
	} {
		err := &Error{Code: codes.OutOfRange, Reason: "R", Message: saidOnce(message, "R", wrong), Violations: wrong}
		if text := err.Error(); text != "OUT_OF_RANGE R: "+want {
			t.Errorf("%s: %s", message, text)
		}
	}
}

func TestAStatusWithoutDetailsIsATypedErrorWithItsCode(t *testing.T) {
	got := failure(t, status.Error(codes.PermissionDenied, "a proxy says no"))
	if got.Code != codes.PermissionDenied || got.Reason != "" || got.Message != "a proxy says no" || got.RetryDelay != nil {
		t.Errorf("%+v", got)
	}
	if got.FailureReason() != 0 || got.NextStep() != 0 {
		t.Errorf("%v %v", got.FailureReason(), got.NextStep())
	}
}

func TestDetailsOfAnotherDomainAreNotTakenForKvgrpcs(t *testing.T) {
	foreign, _ := status.New(codes.Aborted, "x").WithDetails(&errdetails.ErrorInfo{Reason: "CANCELLED", Domain: "proxy.example"})
	if got := failure(t, foreign.Err()); got.Reason != "" {
		t.Errorf("%+v", got)
	}
}

func TestAnUnknownReasonHasNoRetry(t *testing.T) {
	got := failure(t, refusal(codes.Aborted, "OF_TOMORROW", "RETRY_HERE"))
	if got.Reason != "OF_TOMORROW" || got.Next != "RETRY_HERE" || got.NextStep() != pb.NextStep_NEXT_STEP_UNSPECIFIED {
		t.Errorf("%+v: %v", got, got.NextStep())
	}
}

func TestAServerThatIsAwayIsATypedError(t *testing.T) {
	server := serve(t, "")
	server.grpc.Stop()
	_, err := connect(t, server, Options{}).Transfers.GetTransfer(limited(t), &pb.GetTransferRequest{})
	var failed *Error
	if !errors.As(err, &failed) || failed.Code != codes.Unavailable {
		t.Errorf("%v", err)
	}
}
