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

// Scheduler acts for the one scheduler of the server's engine. It reports what happens to requests, and it returns the
// news, each item once and in order.
//
// The first reply states the incarnation of the engine. When the incarnation changes, every step is refused with
// INCARNATION_CHANGED until StartOver.
type Scheduler struct {
	client *Client
	turn   chan struct{} // holds the right to make a step
	stream exchange[pb.ScheduleRequest, pb.ScheduleResponse]
	cancel context.CancelFunc

	mu          sync.Mutex // guards the fields below
	incarnation uint64
	seq         uint64 // of the last news that the caller was given
}

// Scheduler returns the scheduler of the server's engine. Its stream ends with ctx or by Close.
func (c *Client) Scheduler(ctx context.Context) *Scheduler {
	ctx, cancel := c.bound(ctx)
	scheduler := &Scheduler{client: c, turn: make(chan struct{}, 1), cancel: cancel}
	scheduler.stream.ctx, scheduler.stream.open = ctx, c.Schedulers.Schedule
	return scheduler
}

// Close ends the stream. Requests and transfers continue at the server.
func (s *Scheduler) Close() { s.cancel() }

// Incarnation returns the incarnation that the scheduler's requests and blocks belong to; 0 before the first reply.
func (s *Scheduler) Incarnation() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.incarnation
}

// StartOver follows INCARNATION_CHANGED: the restarted engine knows no request, and the kept blocks are gone.
func (s *Scheduler) StartOver() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.incarnation, s.seq = 0, 0
}

// Step sends everything that one step of the scheduler reports, in one message. It returns one answer for each call,
// and the news. A call is a request of SchedulerService (*pb.RequestArrivedRequest, *pb.MatchTokensRequest ...). A call
// that is refused has the error in its answer, see [Refusal]; the other calls take effect.
//
// When a stream breaks, Step opens another one and repeats the step, which is safe. It stops when ctx ends; a ctx
// without a deadline gets the client's timeout. The next Step or Poll acknowledges the news of this one.
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

// Poll returns the news. It waits up to wait for the first item, at most 60 s. It suits a scheduler that is idle.
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

// told returns the news that the caller has not been given. A Step and a Poll at the same time receive the same news.
func (s *Scheduler) told(header *pb.ResponseHeader, news []*pb.SchedulerNews) []*pb.SchedulerNews {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.incarnation == 0 {
		s.incarnation = header.GetIncarnation()
	} else if s.incarnation != header.GetIncarnation() {
		return nil // asked before StartOver, of an earlier incarnation
	}
	for len(news) > 0 && news[0].GetSeq() <= s.seq {
		news = news[1:]
	}
	if len(news) > 0 {
		s.seq = news[len(news)-1].GetSeq()
	}
	return news
}

// Refusal returns the error that refused one call of a step; nil where the call was not refused.
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
