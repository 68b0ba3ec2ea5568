package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// stream is a stream that the runner reads, of a call or of a watch.
type stream struct {
	cancel   context.CancelFunc
	results  chan result // closed after the last one
	requests protoreflect.MessageType

	mu     sync.Mutex // one reader, one writer
	last   result
	raw    grpc.ClientStream // nil for a watch
	sendMu sync.Mutex
}

// result is a message or the end of the stream: an error, or nothing after a status of OK.
type result struct {
	message proto.Message
	err     error
}

// method finds a method of the schema.
func method(name string) (protoreflect.MethodDescriptor, error) {
	full := protoreflect.FullName(strings.ReplaceAll(strings.Trim(name, "/"), "/", "."))
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(full)
	if err != nil {
		return nil, fmt.Errorf("method %q: %w", name, err)
	}
	made, ok := found.(protoreflect.MethodDescriptor)
	if !ok {
		return nil, fmt.Errorf("%q is no method", name)
	}
	return made, nil
}

// path returns the method's name in the form that gRPC uses.
func path(method protoreflect.MethodDescriptor) string {
	return fmt.Sprintf("/%s/%s", method.Parent().FullName(), method.Name())
}

func messageType(descriptor protoreflect.MessageDescriptor) (protoreflect.MessageType, error) {
	return protoregistry.GlobalTypes.FindMessageByName(descriptor.FullName())
}

func outgoing(ctx context.Context, r *request) context.Context {
	for key, value := range r.Metadata {
		ctx = metadata.AppendToOutgoingContext(ctx, key, value)
	}
	return ctx
}

func (e *executor) open(ctx context.Context, r *request) (answer, error) {
	client, err := e.client(r)
	if err != nil {
		return nil, err
	}
	method, err := method(r.Method)
	if err != nil {
		return nil, err
	}
	requests, err := messageType(method.Input())
	if err != nil {
		return nil, err
	}
	responses, err := messageType(method.Output())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(outgoing(ctx, r))
	raw, err := client.Conn().NewStream(ctx, &grpc.StreamDesc{
		StreamName:    string(method.Name()),
		ClientStreams: method.IsStreamingClient(),
		ServerStreams: method.IsStreamingServer(),
	}, path(method))
	if err != nil {
		cancel()
		return nil, err
	}
	made := &stream{cancel: cancel, results: make(chan result), requests: requests, raw: raw}
	put(e, e.streams, r.Stream, made)
	if len(r.Request) > 0 || !method.IsStreamingClient() {
		if err := made.send(r); err != nil {
			cancel()
			return nil, err
		}
	}
	if !method.IsStreamingClient() {
		if err := raw.CloseSend(); err != nil {
			cancel()
			return nil, err
		}
	}
	header, err := raw.Header()
	if err == nil && header == nil { // the call ended before it had any
		err = raw.RecvMsg(responses.New().Interface())
		made.end(result{err: ended(err)})
		return answer{"metadata": answer{}}, ended(err)
	}
	if err != nil {
		cancel()
		return nil, err
	}
	go func() {
		for {
			message := responses.New().Interface()
			if err := raw.RecvMsg(message); err != nil {
				made.end(result{err: ended(err)})
				return
			}
			made.results <- result{message: message}
		}
	}()
	told := answer{}
	for key, values := range header {
		told[key] = strings.Join(values, ",")
	}
	return answer{"metadata": told}, nil
}

// ended returns the error that a stream ended with; nil after a status of OK.
func ended(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}

func (s *stream) end(last result) {
	s.mu.Lock()
	s.last = last
	s.mu.Unlock()
	close(s.results)
}

func (s *stream) send(r *request) error {
	if s.raw == nil {
		return fmt.Errorf("stream %q takes no requests", r.Stream)
	}
	message := s.requests.New().Interface()
	if err := decode(r.Request, message); err != nil {
		return err
	}
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	if err := s.raw.SendMsg(message); err != nil && err != io.EOF { // EOF: `next` returns the reason
		return err
	}
	return nil
}

func (e *executor) onStream(ctx context.Context, r *request) (answer, error) {
	s, err := named(e, e.streams, "stream", r.Stream)
	if err != nil {
		return nil, err
	}
	switch r.Op {
	case "send":
		return answer{}, s.send(r)
	case "finish":
		if s.raw == nil {
			return nil, fmt.Errorf("stream %q takes no requests", r.Stream)
		}
		return answer{}, s.raw.CloseSend()
	case "cancel":
		s.cancel()
		return answer{}, nil
	}
	timeout := time.NewTimer(seconds(r.TimeoutS))
	defer timeout.Stop()
	select {
	case got, more := <-s.results:
		if more {
			return encoded("message", got.message)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		return answer{"end": true}, s.last.err
	case <-timeout.C:
		return answer{"timeout": true}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (e *executor) watch(ctx context.Context, r *request) (answer, error) {
	client, err := e.client(r)
	if err != nil {
		return nil, err
	}
	filter := &pb.TransferFilter{}
	if err := decode(r.Filter, filter); err != nil {
		return nil, err
	}
	var after kvgrpc.Point
	if r.After != nil {
		after = kvgrpc.Point{EventSeq: uint64(r.After.EventSeq), Incarnation: uint64(r.After.Incarnation)}
	}
	ctx, made := e.watching(ctx, r)
	go func() {
		var last result
		for change, err := range client.Watch(ctx, filter, after) {
			if err != nil {
				last = result{err: err}
			} else {
				made.results <- result{message: change}
			}
		}
		made.end(last)
	}()
	return answer{}, nil
}

func (e *executor) watchEngine(ctx context.Context, r *request) (answer, error) {
	client, err := e.client(r)
	if err != nil {
		return nil, err
	}
	ctx, made := e.watching(ctx, r)
	go func() {
		var last result
		for update := range client.WatchEngine(ctx, 0) {
			last = result{err: update.Unreachable}
			if update.Response != nil {
				made.results <- result{message: update.Response}
			}
		}
		if ctx.Err() != nil {
			last = result{} // the watch was cancelled: an earlier outage is not its end
		}
		made.end(last)
	}()
	return answer{}, nil
}

func (e *executor) watching(ctx context.Context, r *request) (context.Context, *stream) {
	ctx, cancel := context.WithCancel(outgoing(ctx, r))
	made := &stream{cancel: cancel, results: make(chan result)}
	put(e, e.streams, r.Stream, made)
	return ctx, made
}
