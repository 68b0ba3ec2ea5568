package kvgrpc

import (
	"context"
	"io"

	"google.golang.org/grpc"
)

// exchange is a stream with one answer for each request. It has one request at a time. A stream that failed is not used
// again; the next request opens another one.
type exchange[Request, Response any] struct {
	ctx    context.Context // of the streams
	open   func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[Request, Response], error)
	stream grpc.BidiStreamingClient[Request, Response]
	cancel context.CancelFunc
}

// ask returns the answer. When ctx ends first, ask ends the stream, because the next request would read the late
// answer.
func (e *exchange[Request, Response]) ask(ctx context.Context, request *Request) (*Response, error) {
	var streaming context.Context
	if e.stream == nil {
		streaming, e.cancel = context.WithCancel(e.ctx)
	}
	stop := context.AfterFunc(ctx, e.cancel)
	response, err := e.attempt(streaming, request)
	if !stop() && err == nil {
		e.close() // ctx ended just as the answer came; the answer counts
	}
	if err != nil {
		e.close()
		for _, over := range []context.Context{ctx, e.ctx} {
			if over.Err() != nil {
				return nil, overError(over)
			}
		}
		return nil, err
	}
	return response, nil
}

func (e *exchange[Request, Response]) attempt(streaming context.Context, request *Request) (*Response, error) {
	if e.stream == nil {
		stream, err := e.open(streaming)
		if err != nil {
			return nil, err
		}
		e.stream = stream
	}
	// io.EOF says that the stream has ended. Recv returns the reason.
	if err := e.stream.Send(request); err != nil && err != io.EOF {
		return nil, err
	}
	return e.stream.Recv()
}

func (e *exchange[Request, Response]) close() {
	if e.cancel != nil {
		e.cancel()
	}
	e.stream, e.cancel = nil, nil
}
