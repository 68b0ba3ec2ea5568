package kvgrpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// ErrorDomain is the domain of the google.rpc.ErrorInfo of a kvgrpc server.
const ErrorDomain = "kvgrpc.dev"

// Error is the error of every call and stream of a client:
//
//	var failed *kvgrpc.Error
//	if errors.As(err, &failed) && failed.NextStep() == pb.NextStep_NEXT_STEP_RECOMPUTE { ... }
//
// It also works with status.Code and status.FromError of gRPC.
type Error struct {
	// Code is the gRPC status code.
	Code codes.Code
	// Reason is a name of FailureReason without its prefix. It is empty where no kvgrpc server made the error.
	Reason string
	// Next is a name of NextStep without its prefix: the recommended next step. Programs use the method NextStep.
	Next string
	// Message is one sentence for readers.
	Message string
	// EngineID names the engine that refused.
	EngineID string
	// Incarnation identifies the life of that engine, 0 where it is not stated.
	Incarnation uint64
	// Metadata is what the reason needs besides the other fields, for example `phase`, `limit` or `group`.
	Metadata map[string]string
	// Method is the called method, `PoolService/AllocateBlocks`. Address is the server that was called.
	Method, Address string
	// Violations name the wrong fields of the request.
	Violations []Violation
	// RetryDelay is how long to wait before the same call can succeed; nil where the server stated nothing.
	RetryDelay *time.Duration
	// IdempotencyKey is the key of the request. The same request with this key retries the call and makes no second
	// one.
	IdempotencyKey string

	cause error // of the caller's own context
}

// Violation is a wrong field of the request and what is wrong with it.
type Violation struct{ Field, Description string }

func (e *Error) Error() string {
	var text strings.Builder
	text.WriteString(code.Code(e.Code).String())
	if e.Reason != "" {
		text.WriteString(" " + e.Reason)
	}
	text.WriteString(": ")
	for _, violation := range e.Violations {
		if violation.Description == e.Message {
			text.WriteString(violation.Field + ": ")
			break
		}
	}
	text.WriteString(e.Message)
	for _, violation := range e.Violations {
		if violation.Description != e.Message {
			fmt.Fprintf(&text, "; %s: %s", violation.Field, violation.Description)
		}
	}
	if e.Method != "" {
		fmt.Fprintf(&text, " (%s at %s)", e.Method, e.Address)
	}
	return text.String()
}

// saidOnce returns a message without the reason and the violations. A server writes both into the message for tools
// that show nothing else.
func saidOnce(message, reason string, violations []Violation) string {
	if reason != "" {
		message = strings.TrimPrefix(message, reason+": ")
	}
	for _, violation := range violations {
		if strings.HasPrefix(message, violation.Field+": "+violation.Description) {
			return violation.Description
		}
	}
	if len(violations) > 0 {
		if said, _, found := strings.Cut(message, "; "+violations[0].Field+": "); found {
			return said
		}
	}
	return message
}

// Unwrap returns context.Canceled or context.DeadlineExceeded where the caller's context ended the call.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus lets package status of gRPC read the error.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Error()) }

// FailureReason returns the reason as a value, UNSPECIFIED where this version does not know it.
func (e *Error) FailureReason() pb.FailureReason {
	return pb.FailureReason(pb.FailureReason_value["FAILURE_REASON_"+e.Reason])
}

// NextStep returns the recommended next step. It is UNSPECIFIED, which is no retry, where this version does not know
// the reason.
func (e *Error) NextStep() pb.NextStep {
	return nextStep(e.FailureReason(), pb.NextStep(pb.NextStep_value["NEXT_STEP_"+e.Next]))
}

// at adds the method and the address to an error that has no method yet.
func at(err error, method, address string) error {
	var failed *Error
	if errors.As(err, &failed) && failed.Method == "" {
		failed.Method, failed.Address = strings.TrimPrefix(method, "/kvgrpc.v1."), address
	}
	return err
}

// toError returns the typed error of a call with this context. The end of a stream stays io.EOF.
func toError(ctx context.Context, err error, key string) error {
	var typed *Error
	if err == nil || err == io.EOF || errors.As(err, &typed) {
		return err
	}
	found := status.Convert(err)
	made := &Error{Code: found.Code(), Message: found.Message(), IdempotencyKey: key}
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == ErrorDomain {
				made.take(detail)
			}
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				made.Violations = append(made.Violations, Violation{violation.Field, violation.Description})
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay().AsDuration()
			made.RetryDelay = &delay
		}
	}
	made.Message = saidOnce(made.Message, made.Reason, made.Violations)
	switch _, stated := ctx.Deadline(); {
	case made.Reason != "":
	case made.Code == codes.Canceled:
		made.cause = ctx.Err()
	case made.Code == codes.DeadlineExceeded && stated:
		made.cause = context.DeadlineExceeded // the server may have noticed it before ctx has
	}
	return made
}

func (e *Error) take(info *errdetails.ErrorInfo) {
	e.Reason = info.Reason
	e.Metadata = maps.Clone(info.Metadata)
	e.Next = e.Metadata["next"]
	e.EngineID = e.Metadata["engine_id"]
	e.Incarnation, _ = strconv.ParseUint(e.Metadata["incarnation"], 10, 64)
	for _, key := range []string{"next", "engine_id", "incarnation"} {
		delete(e.Metadata, key)
	}
}

// broken reports whether a stream ended for a temporary reason, so that another stream may succeed.
func broken(err error) bool {
	if err == io.EOF {
		return true // the server ended it: it restarts, or a proxy bounds the life of streams
	}
	var failed *Error
	if !errors.As(err, &failed) {
		return false
	}
	switch failed.Code {
	case codes.Unavailable:
		return true
	case codes.Internal, codes.Unknown, codes.Canceled, codes.DeadlineExceeded:
		return failed.Reason == "" // made by gRPC or a proxy when a connection was cut
	default:
		return false
	}
}

// notBegun reports whether an error may be that of a call that a server had received and not begun when it ended: gRPC
// ends such a call with CANCELLED and no reason. A context that is over has cancelled the call itself.
func notBegun(ctx context.Context, err error) bool {
	var failed *Error
	return errors.As(err, &failed) && failed.Code == codes.Canceled && failed.Reason == "" && ctx.Err() == nil
}

// tooLarge is part of gRPC's own error text for a message that exceeds the reader's size limit. The error has the code
// of a temporary failure, although the same message would come again.
const tooLarge = "larger than max"

// brokenOrFull reports whether broken does, or whether the server refused because of too many streams or a slow reader.
func brokenOrFull(err error) bool {
	if broken(err) {
		return true
	}
	var failed *Error
	return errors.As(err, &failed) && failed.Code == codes.ResourceExhausted &&
		(failed.Reason != "" || !strings.Contains(failed.Message, tooLarge))
}

// retryDelay returns the delay that the server asked for, 0 where it asked for none.
func retryDelay(err error) time.Duration {
	var failed *Error
	if errors.As(err, &failed) && failed.RetryDelay != nil {
		return *failed.RetryDelay
	}
	return 0
}
