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

// ErrorDomain is that of the google.rpc.ErrorInfo of a kvgrpc server.
const ErrorDomain = "kvgrpc.dev"

// Error is what every call and stream of a client fails with:
//
//	var failed *kvgrpc.Error
//	if errors.As(err, &failed) && failed.NextStep() == pb.NextStep_NEXT_STEP_RECOMPUTE { ... }
//
// status.Code and status.FromError of gRPC work on it, too.
type Error struct {
	// Code is the gRPC status code.
	Code codes.Code
	// Reason is a name of FailureReason without its prefix. Empty where the error was not made by a kvgrpc server.
	Reason string
	// Next is a name of NextStep without its prefix: what would help. Programs use NextStep.
	Next string
	// Message is one sentence, for readers.
	Message string
	// EngineID names the engine that refused.
	EngineID string
	// Incarnation is the life of that engine, 0 where it is not stated.
	Incarnation uint64
	// Metadata is what the reason needs beside these: `phase`, `limit`, `group` ...
	Metadata map[string]string
	// Method is that which was called, `PoolService/AllocateBlocks`, and Address the server it was called at.
	Method, Address string
	// Violations name the wrong fields.
	Violations []Violation
	// RetryDelay is how long to wait before the same call can succeed; nil where the server stated nothing.
	RetryDelay *time.Duration
	// IdempotencyKey of the request. The same request with this key repeats the call, instead of making a second one.
	IdempotencyKey string

	cause error // of the caller's own context
}

// Violation is a field of the request and what is wrong with it.
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

// saidOnce is a message without the reason and the violations, which a server writes into it for tools that show no
// more.
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

// Unwrap gives context.Canceled or context.DeadlineExceeded where the caller's context ended the call.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus lets package status of gRPC read the error.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Error()) }

// FailureReason is the reason as a value, UNSPECIFIED where this version does not know it.
func (e *Error) FailureReason() pb.FailureReason {
	return pb.FailureReason(pb.FailureReason_value["FAILURE_REASON_"+e.Reason])
}

// NextStep is what would help, as far as this version knows the reason: never retry what you do not understand.
func (e *Error) NextStep() pb.NextStep {
	return nextStep(e.FailureReason(), pb.NextStep(pb.NextStep_value["NEXT_STEP_"+e.Next]))
}

// at says of an error where it is from, unless it does.
func at(err error, method, address string) error {
	var failed *Error
	if errors.As(err, &failed) && failed.Method == "" {
		failed.Method, failed.Address = strings.TrimPrefix(method, "/kvgrpc.v1."), address
	}
	return err
}

// toError makes the typed error of what a call with this context ended with. The end of a stream stays io.EOF.
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

// broken says whether a stream ended for a cause that passes: another one may stand.
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
		return failed.Reason == "" // made by gRPC or a proxy, of a connection that was cut
	default:
		return false
	}
}

// What gRPC itself says of a message that is longer than its reader takes: with the code of what passes, though the same
// message comes again.
const tooLarge = "larger than max"

// brokenOrFull is broken, or refused because there are too many streams at the moment or this one was read too slowly.
func brokenOrFull(err error) bool {
	if broken(err) {
		return true
	}
	var failed *Error
	return errors.As(err, &failed) && failed.Code == codes.ResourceExhausted &&
		(failed.Reason != "" || !strings.Contains(failed.Message, tooLarge))
}

// retryDelay is what the server asked for, 0 where it asked for nothing.
func retryDelay(err error) time.Duration {
	var failed *Error
	if errors.As(err, &failed) && failed.RetryDelay != nil {
		return *failed.RetryDelay
	}
	return 0
}
