package kvgrpc

import (
	"context"
	"crypto/rand"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

const (
	traceparentKey = "traceparent"
	// A server waits no longer than this, whatever the request states.
	serverWait = time.Minute
	// ConnectPeer waits for another server, and ReleaseQuarantine for the transfers in flight.
	longCall = time.Minute
	// PutTensor returns when its consumers have the tensor. Without a timeout in the request the server waits two
	// minutes. A stated timeout is limited to the longest life of a lease.
	putTensor        = 2 * time.Minute
	longestPutTensor = 10 * time.Minute
	// A call is repeated so often at most where a server that ends has not begun it.
	notBegunRepeats = 2
)

// WithTraceparent gives all calls with this context a W3C traceparent, so that the server's spans join the trace.
func WithTraceparent(ctx context.Context, traceparent string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, traceparentKey, traceparent)
}

// calls gives each call its deadline, its metadata, its idempotency key and its typed error.
type calls struct {
	Options
	token *bearer // nil for none
}

func (c calls) unary(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	if _, stated := ctx.Deadline(); !stated {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, deadline(request, c.Timeout))
		defer cancel()
	}
	// The key is set outside gRPC's own retries, so that all of them carry the same key.
	request, key := withKey(request)
	outgoing := c.outgoing(ctx)
	for repeats := 0; ; repeats++ {
		err := toError(ctx, invoke(outgoing, method, request, reply, conn, options...), key)
		if repeats == notBegunRepeats || !notBegun(ctx, err) {
			return at(err, method, conn.Target())
		}
	}
}

func (c calls) stream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer,
	options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	stream, err := open(c.outgoing(ctx), desc, conn, method, options...)
	if err != nil {
		return nil, at(toError(ctx, err, ""), method, conn.Target())
	}
	return typedStream{stream, method, conn.Target()}, nil
}

// typedStream is a stream that ends with typed errors.
type typedStream struct {
	grpc.ClientStream
	method, address string
}

func (s typedStream) typed(err error) error {
	return at(toError(s.Context(), err, ""), s.method, s.address)
}

func (s typedStream) RecvMsg(message any) error {
	return s.typed(s.ClientStream.RecvMsg(message))
}

func (s typedStream) SendMsg(message any) error {
	return s.typed(s.ClientStream.SendMsg(message))
}

func (s typedStream) Header() (metadata.MD, error) {
	header, err := s.ClientStream.Header()
	return header, s.typed(err)
}

// outgoing adds the client's metadata. It adds the trace of the call unless the caller has stated one.
func (c calls) outgoing(ctx context.Context) context.Context {
	for key, value := range c.Metadata {
		ctx = metadata.AppendToOutgoingContext(ctx, key, value)
	}
	if c.token != nil {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", c.token.value())
	}
	if c.Traceparent == nil {
		return ctx
	}
	if stated, _ := metadata.FromOutgoingContext(ctx); len(stated.Get(traceparentKey)) > 0 {
		return ctx
	}
	if traceparent := c.Traceparent(ctx); traceparent != "" {
		ctx = WithTraceparent(ctx, traceparent)
	}
	return ctx
}

// deadline returns the deadline of a call whose context states none. A wait at the server is added to the usual time.
func deadline(request any, usual time.Duration) time.Duration {
	switch request := request.(type) {
	case *pb.WaitTransferRequest:
		return wanted(request.Timeout, serverWait) + usual
	case *pb.WaitTransfersRequest:
		return wanted(request.Timeout, serverWait) + usual
	case *pb.PullBlocksRequest:
		return waitInCall(request.Wait) + usual
	case *pb.ReserveBlocksRequest:
		return waitInCall(request.Wait) + usual
	case *pb.PollSchedulerNewsRequest:
		return wanted(request.Wait, 0) + usual
	case *pb.GetTensorRequest:
		return wanted(request.Timeout, serverWait) + usual
	case *pb.PutTensorRequest:
		return wantedUpTo(longestPutTensor, request.Timeout, putTensor) + usual
	case *pb.ConnectPeerRequest, *pb.ReleaseQuarantineRequest:
		return max(longCall, usual)
	default:
		return usual
	}
}

// waitInCall returns how long a call itself waits; 0 where it does not wait.
func waitInCall(wait *pb.TransferWait) time.Duration {
	if wait == nil {
		return 0
	}
	return wanted(wait.Timeout, serverWait)
}

// wanted returns the wait that a request states, limited to the longest that a server allows, or unset where none is.
func wanted(stated *durationpb.Duration, unset time.Duration) time.Duration {
	return wantedUpTo(serverWait, stated, unset)
}

func wantedUpTo(most time.Duration, stated *durationpb.Duration, unset time.Duration) time.Duration {
	if stated == nil {
		return unset
	}
	return min(max(stated.AsDuration(), 0), most)
}

// withKey returns a request with a random idempotency key where its own is empty. The key is set on a shallow copy,
// because a caller that sends the same message twice means two calls.
func withKey(request any) (any, string) {
	message, ok := request.(proto.Message)
	if !ok {
		return request, ""
	}
	given := message.ProtoReflect()
	field := given.Descriptor().Fields().ByName("idempotency_key")
	if field == nil || field.Kind() != protoreflect.StringKind {
		return request, ""
	}
	if key := given.Get(field).String(); key != "" {
		return request, key
	}
	key := rand.Text()
	keyed := given.New()
	given.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		keyed.Set(field, value)
		return true
	})
	keyed.SetUnknown(given.GetUnknown())
	keyed.Set(field, protoreflect.ValueOfString(key))
	return keyed.Interface(), key
}
