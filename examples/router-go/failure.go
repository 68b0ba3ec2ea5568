package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

const (
	retryHere    = pb.NextStep_NEXT_STEP_RETRY_HERE
	retryOther   = pb.NextStep_NEXT_STEP_RETRY_OTHER_CONSUMER
	recompute    = pb.NextStep_NEXT_STEP_RECOMPUTE
	fixRequest   = pb.NextStep_NEXT_STEP_FIX_REQUEST
	nothingHelps = pb.NextStep_NEXT_STEP_UNSPECIFIED
)

// failure is why a step failed, and what helps.
type failure struct {
	// at is the engine of the step; nil where there was none.
	at *engine
	// what is what was done.
	what string
	// next is what helps.
	next pb.NextStep
	// delay is how long to wait before the next step, where it was stated.
	delay time.Duration
	// body is the HTTP answer of the engine, for the client; empty where the engine gave none.
	body []byte
	// status is the status of the HTTP answer.
	status int
	err    error
}

func (f *failure) Error() string {
	if f.at == nil {
		return fmt.Sprintf("%s: %v", f.what, f.err)
	}
	return fmt.Sprintf("%s at %s: %v", f.what, f.at, f.err)
}

func (f *failure) Unwrap() error { return f.err }

// nextOf returns what helps after an error.
func nextOf(err error) pb.NextStep {
	var f *failure
	if errors.As(err, &f) {
		return f.next
	}
	return nothingHelps
}

// refused returns the failure of a call to an engine's lead.
func refused(ctx context.Context, at *engine, what string, err error) error {
	if ctx.Err() != nil {
		return ctx.Err() // the request is over, which is no failure of an engine
	}
	f := &failure{at: at, what: what, err: err}
	var typed *kvgrpc.Error
	if errors.As(err, &typed) {
		f.next = typed.NextStep()
		if typed.RetryDelay != nil {
			f.delay = *typed.RetryDelay
		}
		if typed.Reason == "" && away(typed.Code) {
			f.next = retryOther
		}
	}
	return f
}

// away reports whether a code that no kvgrpc server has returned means that no server is there. Others may be there.
func away(code codes.Code) bool {
	switch code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Internal, codes.Unknown, codes.Unimplemented:
		return true
	default:
		return false
	}
}

// ended returns the failure of a transfer that did not succeed.
func ended(at *engine, transfer *pb.Transfer) error {
	reason := transfer.GetFailure()
	return &failure{
		at: at, what: "the transfer", next: kvgrpc.NextStep(reason),
		err: fmt.Errorf("%s is %v: %v: %s", transfer.GetTransferId(), transfer.GetState(), reason.GetReason(),
			reason.GetMessage()),
	}
}

// unanswered returns the failure of an HTTP call whose answer is missing or incomplete: the engine is away.
func unanswered(ctx context.Context, at *engine, what string, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return &failure{at: at, what: what, next: retryOther, err: err}
}

// answered returns the failure that an HTTP answer other than 200 reports.
func answered(at *engine, what string, answer *http.Response, body []byte) *failure {
	f := &failure{
		at: at, what: what, next: retryOther, status: answer.StatusCode,
		err: fmt.Errorf("HTTP %s: %.512s", answer.Status, body),
	}
	switch code := answer.StatusCode; {
	case code == http.StatusConflict:
		f.next = recompute // a driven engine that was given blocks of another life
	case code == http.StatusTooManyRequests || code == http.StatusRequestTimeout || code >= 500:
		if seconds, err := strconv.Atoi(answer.Header.Get("Retry-After")); err == nil {
			f.delay = time.Duration(seconds) * time.Second
		}
	default:
		f.next, f.body = fixRequest, body
	}
	return f
}

// wrong returns the failure of a request that fails at every engine.
func wrong(format string, values ...any) error {
	return &failure{what: "the request", next: fixRequest, err: fmt.Errorf(format, values...)}
}

// noEngine returns the failure of a request for which no engine is left.
func noEngine(role role) error {
	return &failure{what: "choosing an engine", next: retryHere, delay: time.Second,
		err: fmt.Errorf("no %s engine takes work", role)}
}
