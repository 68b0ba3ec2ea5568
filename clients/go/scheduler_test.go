package kvgrpc

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

type scheduleStream = grpc.BidiStreamingServer[pb.ScheduleRequest, pb.ScheduleResponse]

// policy plays a server: it keeps news until they are acknowledged, and answers each call.
type policy struct {
	mu          sync.Mutex
	incarnation uint64
	made        uint64 // number of news so far; each step makes one
	kept        []*pb.SchedulerNews
	asked       []string
	// lose reports whether the answer to the n-th step is lost.
	lose func(step int) bool
}

func (p *policy) news(afterSeq uint64) []*pb.SchedulerNews {
	for len(p.kept) > 0 && p.kept[0].Seq <= afterSeq {
		p.kept = p.kept[1:]
	}
	return p.kept
}

func (p *policy) schedule(stream scheduleStream) error {
	for {
		request, err := stream.Recv()
		if err != nil {
			return nil
		}
		p.mu.Lock()
		p.asked = append(p.asked, fmt.Sprintf("%d calls after %d of %d", len(request.Calls), request.AfterSeq, request.Incarnation))
		step := len(p.asked)
		if request.Incarnation != 0 && request.Incarnation != p.incarnation {
			p.mu.Unlock()
			return refusal(codes.Aborted, "INCARNATION_CHANGED", "RECOMPUTE")
		}
		p.made++
		p.kept = append(p.kept, &pb.SchedulerNews{Seq: p.made, RequestId: fmt.Sprint(p.made)})
		reply := &pb.ScheduleResponse{Header: header(0, p.incarnation), News: p.news(request.AfterSeq)}
		for range request.Calls {
			reply.Answers = append(reply.Answers, &pb.ScheduleAnswer{})
		}
		p.mu.Unlock()
		if p.lose != nil && p.lose(step) {
			return status.Error(codes.Unavailable, "cut")
		}
		stream.Send(reply)
	}
}

func (p *policy) poll(_ context.Context, r *pb.PollSchedulerNewsRequest) (*pb.PollSchedulerNewsResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return &pb.PollSchedulerNewsResponse{Header: header(0, p.incarnation), News: p.news(r.AfterSeq)}, nil
}

func schedulerOf(t *testing.T, fake *policy) (*server, *Scheduler) {
	server := serve(t, "", &schedulers{schedule: fake.schedule, poll: fake.poll})
	scheduler := connect(t, server, Options{}).Scheduler(limited(t))
	t.Cleanup(scheduler.Close)
	return server, scheduler
}

func seqs(news []*pb.SchedulerNews) (seqs []string) {
	for _, one := range news {
		seqs = append(seqs, fmt.Sprint(one.Seq))
	}
	return seqs
}

func TestAStepAcknowledgesTheNewsOfTheLastAndStatesTheLife(t *testing.T) {
	fake := &policy{incarnation: 7}
	_, scheduler := schedulerOf(t, fake)
	for _, want := range []string{"1", "2"} {
		reply, err := scheduler.Step(limited(t), &pb.MatchTokensRequest{RequestId: "r"}, &pb.AbortRequestRequest{RequestId: "s"})
		if err != nil || len(reply.Answers) != 2 {
			t.Fatal(reply, err)
		}
		equal(t, "news", seqs(reply.News), want)
	}
	equal(t, "asked", fake.asked, "2 calls after 0 of 0", "2 calls after 1 of 7")
	if scheduler.Incarnation() != 7 {
		t.Error(scheduler.Incarnation())
	}
}

func TestAStepWhoseAnswerIsLostIsRepeatedAndItsNewsComeOnceAndInOrder(t *testing.T) {
	fake := &policy{incarnation: 7, lose: func(step int) bool { return step == 2 || step == 3 }}
	server, scheduler := schedulerOf(t, fake)
	var told []string
	for range 3 {
		reply, err := scheduler.Step(limited(t), &pb.MatchTokensRequest{})
		if err != nil {
			t.Fatal(err)
		}
		told = append(told, seqs(reply.News)...)
	}
	server.cut() // between two steps
	reply, err := scheduler.Step(limited(t))
	if err != nil {
		t.Fatal(err)
	}
	told = append(told, seqs(reply.News)...)
	equal(t, "news", told, "1", "2", "3", "4", "5", "6")
	equal(t, "asked", fake.asked, "1 calls after 0 of 0", "1 calls after 1 of 7", "1 calls after 1 of 7",
		"1 calls after 1 of 7", "1 calls after 4 of 7", "0 calls after 5 of 7")
}

func TestAStepAndAPollTellTheSameNewsOnce(t *testing.T) {
	fake := &policy{incarnation: 7}
	_, scheduler := schedulerOf(t, fake)
	if _, err := scheduler.Step(limited(t)); err != nil {
		t.Fatal(err)
	}
	fake.kept = append(fake.kept, &pb.SchedulerNews{Seq: 2})
	fake.made = 2
	news, err := scheduler.Poll(limited(t), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "news of the poll", seqs(news), "2")
	// A poll was under way while a step delivered its news.
	late := scheduler.told(header(0, 7), []*pb.SchedulerNews{{Seq: 1}, {Seq: 2}, {Seq: 3}})
	equal(t, "late news", seqs(late), "3")
}

func TestAnotherLifeIsRefusedUntilTheSchedulerStartsOver(t *testing.T) {
	fake := &policy{incarnation: 7}
	_, scheduler := schedulerOf(t, fake)
	scheduler.Step(limited(t))
	fake.mu.Lock()
	fake.incarnation, fake.made, fake.kept = 8, 0, nil
	fake.mu.Unlock()
	for range 2 {
		if _, err := scheduler.Step(limited(t)); status.Code(err) != codes.Aborted {
			t.Fatal(err)
		}
	}
	scheduler.StartOver()
	reply, err := scheduler.Step(limited(t))
	if err != nil || scheduler.Incarnation() != 8 {
		t.Fatal(err, scheduler.Incarnation())
	}
	equal(t, "news", seqs(reply.News), "1")
}

func TestAStepThatIsRefusedIsNotRepeated(t *testing.T) {
	calls := 0
	server := serve(t, "", &schedulers{schedule: func(stream scheduleStream) error {
		calls++
		stream.Recv()
		return refusal(codes.OutOfRange, "LIMIT_EXCEEDED", "FIX_REQUEST")
	}})
	scheduler := connect(t, server, Options{}).Scheduler(limited(t))
	if _, err := scheduler.Step(limited(t)); status.Code(err) != codes.OutOfRange || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func TestALateAnswerIsNotTakenForThatToTheNextStep(t *testing.T) {
	release := make(chan struct{})
	server := serve(t, "", &schedulers{schedule: func(stream scheduleStream) error {
		for {
			request, err := stream.Recv()
			if err != nil {
				return nil
			}
			if len(request.Calls) == 0 {
				<-release
			}
			stream.Send(&pb.ScheduleResponse{
				Header: header(0, 7), Answers: make([]*pb.ScheduleAnswer, len(request.Calls)),
			})
		}
	}})
	scheduler := connect(t, server, Options{}).Scheduler(limited(t))
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := scheduler.Step(short); status.Code(err) != codes.DeadlineExceeded {
		t.Fatal(err)
	}
	close(release)
	reply, err := scheduler.Step(limited(t), &pb.MatchTokensRequest{})
	if err != nil || len(reply.Answers) != 1 {
		t.Errorf("%v, %v", reply, err)
	}
}

func TestEveryCallOfTheSchemaMayBePartOfAStep(t *testing.T) {
	fields := (&pb.ScheduleCall{}).ProtoReflect().Descriptor().Oneofs().ByName("call").Fields()
	for i := range fields.Len() {
		kind := (&pb.ScheduleCall{}).ProtoReflect().NewField(fields.Get(i)).Message()
		made, err := stepCall(kind.Interface())
		if err != nil {
			t.Error(err)
		} else if !made.ProtoReflect().Has(fields.Get(i)) {
			t.Errorf("%s became %v", fields.Get(i).Name(), made)
		}
	}
}

func TestAStepHasOnlyRequestsOfItsService(t *testing.T) {
	_, scheduler := schedulerOf(t, &policy{incarnation: 7})
	if _, err := scheduler.Step(limited(t), &pb.GetTransferRequest{}); err == nil {
		t.Error("a step took a request of another service")
	}
}

func TestARefusedCallOfAStepIsTheErrorThatItWouldBeAlone(t *testing.T) {
	got := Refusal(&pb.ScheduleAnswer{StatusCode: uint32(codes.OutOfRange), Failure: &pb.Failure{
		Reason:  pb.FailureReason_FAILURE_REASON_BLOCK_OUT_OF_RANGE,
		Next:    pb.NextStep_NEXT_STEP_FIX_REQUEST,
		Message: "no",
	}})
	if got.Code != codes.OutOfRange || got.Reason != "BLOCK_OUT_OF_RANGE" || got.NextStep() != pb.NextStep_NEXT_STEP_FIX_REQUEST {
		t.Errorf("%+v", got)
	}
	if got := Refusal(&pb.ScheduleAnswer{StatusCode: 99, Failure: &pb.Failure{Reason: unknown}}); got.Code != codes.Unknown || got.NextStep() != 0 {
		t.Errorf("%+v", got)
	}
	if Refusal(&pb.ScheduleAnswer{}) != nil {
		t.Error("an answer that is no refusal")
	}
}
