package kvgrpc

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// Scheduler speaks for the scheduler of the server's engine, which has one: it says what happens to requests, and is
// told the news, each once and in order.
//
// The first reply says which life of the engine this is. When that is over every step is refused with
// INCARNATION_CHANGED until StartOver.
type Scheduler struct {
	client *Client
	turn   chan struct{} // holds the right to make a step
	stream exchange[pb.ScheduleRequest, pb.ScheduleResponse]
	cancel context.CancelFunc

	mu          sync.Mutex // guards what follows
	incarnation uint64
	seq         uint64 // of the last news that the caller was given
}

// Scheduler starts to speak for the engine's scheduler. Its stream ends with ctx or by Close.
func (c *Client) Scheduler(ctx context.Context) *Scheduler {
	ctx, cancel := c.bound(ctx)
	scheduler := &Scheduler{client: c, turn: make(chan struct{}, 1), cancel: cancel}
	scheduler.stream.ctx, scheduler.stream.open = ctx, c.Schedulers.Schedule
	return scheduler
}

// Close ends the stream. Requests and transfers live on at the server.
func (s *Scheduler) Close() { s.cancel() }

// Incarnation is the life of the engine that the scheduler's requests and blocks are of; 0 before the first reply.
func (s *Scheduler) Incarnation() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.incarnation
}

// StartOver follows INCARNATION_CHANGED: the engine lives anew, knows no request, and blocks that were kept are gone.
func (s *Scheduler) StartOver() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.incarnation, s.seq = 0, 0
}

// Step says all that one step of the scheduler has to say, in one message, and returns one answer for each call, and
// the news. A call is a request of SchedulerService (*pb.RequestArrivedRequest, *pb.MatchTokensRequest ...). One that is
// refused says so in its answer, see [Refusal], and the others go on.
//
// A stream that breaks is opened again and the step repeated, which is safe, until ctx ends or the client's timeout is
// over. The next Step or Poll tells the server that this one's news have arrived.
func (s *Scheduler) Step(ctx context.Context, calls ...proto.Message) (*pb.ScheduleResponse, error) {
	request := &pb.ScheduleRequest{}
	for _, call := range calls {
		made, err := stepCall(call)
		if err != nil {
			return nil, err
		}
		request.Calls = append(request.Calls, made)
	}
	if _, stated := ctx.Deadline(); !stated {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.client.timeout)
		defer cancel()
	}
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, overError(ctx)
	}
	request.AfterSeq, request.Incarnation = s.position()
	var pauses pauses
	var last error
	for {
		reply, err := s.stream.ask(ctx, request)
		switch {
		case err == nil:
			reply.News = s.told(reply.GetHeader(), reply.GetNews())
			return reply, nil
		case ctx.Err() != nil && last != nil:
			return nil, last // says more than that the time is over
		case ctx.Err() != nil || s.stream.ctx.Err() != nil || !broken(err):
			return nil, err
		}
		if last = err; pauses.take(ctx, retryDelay(err)) != nil {
			return nil, last
		}
	}
}

// Poll returns what is new, and waits for the first of it, at most 60 s: for a scheduler that has nothing to do.
func (s *Scheduler) Poll(ctx context.Context, wait time.Duration) ([]*pb.SchedulerNews, error) {
	request := &pb.PollSchedulerNewsRequest{}
	request.AfterSeq, request.Incarnation = s.position()
	if wait > 0 {
		request.Wait = durationpb.New(min(wait, serverWait))
	}
	reply, err := s.client.Schedulers.PollSchedulerNews(ctx, request)
	if err != nil {
		return nil, err
	}
	return s.told(reply.GetHeader(), reply.GetNews()), nil
}

func (s *Scheduler) position() (seq, incarnation uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seq, s.incarnation
}

// told returns the news that the caller has not been given: a Step and a Poll at one time are told the same.
func (s *Scheduler) told(header *pb.ResponseHeader, news []*pb.SchedulerNews) []*pb.SchedulerNews {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.incarnation == 0 {
		s.incarnation = header.GetIncarnation()
	} else if s.incarnation != header.GetIncarnation() {
		return nil // asked before StartOver: of a life that is over
	}
	for len(news) > 0 && news[0].GetSeq() <= s.seq {
		news = news[1:]
	}
	if len(news) > 0 {
		s.seq = news[len(news)-1].GetSeq()
	}
	return news
}

// Refusal is the error that one call of a step was refused with; nil where it was not.
func Refusal(answer *pb.ScheduleAnswer) *Error {
	failure := answer.GetFailure()
	if failure == nil {
		return nil
	}
	made := &Error{Code: codes.Code(answer.GetStatusCode()), Message: failure.GetMessage()}
	if made.Code == codes.OK || made.Code > codes.Unauthenticated {
		made.Code = codes.Unknown
	}
	made.Reason = shortName(failure.GetReason(), "FAILURE_REASON_")
	made.Next = shortName(failure.GetNext(), "NEXT_STEP_")
	return made
}

func stepCall(request proto.Message) (*pb.ScheduleCall, error) {
	switch request := request.(type) {
	case *pb.RequestArrivedRequest:
		return &pb.ScheduleCall{Call: &pb.ScheduleCall_RequestArrived{RequestArrived: request}}, nil
	case *pb.MatchTokensRequest:
		return &pb.ScheduleCall{Call: &pb.ScheduleCall_MatchTokens{MatchTokens: request}}, nil
	case *pb.BlocksAllocatedRequest:
		return &pb.ScheduleCall{Call: &pb.ScheduleCall_BlocksAllocated{BlocksAllocated: request}}, nil
	case *pb.TokensComputedRequest:
		return &pb.ScheduleCall{Call: &pb.ScheduleCall_TokensComputed{TokensComputed: request}}, nil
	case *pb.BlocksLoadedRequest:
		return &pb.ScheduleCall{Call: &pb.ScheduleCall_BlocksLoaded{BlocksLoaded: request}}, nil
	case *pb.RequestPreemptedRequest:
		return &pb.ScheduleCall{Call: &pb.ScheduleCall_RequestPreempted{RequestPreempted: request}}, nil
	case *pb.RequestFinishedRequest:
		return &pb.ScheduleCall{Call: &pb.ScheduleCall_RequestFinished{RequestFinished: request}}, nil
	case *pb.AbortRequestRequest:
		return &pb.ScheduleCall{Call: &pb.ScheduleCall_AbortRequest{AbortRequest: request}}, nil
	case *pb.BlocksNeededRequest:
		return &pb.ScheduleCall{Call: &pb.ScheduleCall_BlocksNeeded{BlocksNeeded: request}}, nil
	default:
		return nil, fmt.Errorf("kvgrpc: a step has requests of SchedulerService, not %T", request)
	}
}
