package main

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func failing(reason pb.FailureReason, next pb.NextStep) *pb.Failure {
	return &pb.Failure{Reason: reason, Next: next, Message: "by the test"}
}

func TestRetryHereIsFollowedAtTheSameEngineAfterTheDelay(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive", "drive"})
	s.d[1].set(func() { s.d[1].free = 8 }) // the other engine has less room
	until(t, func() bool { return s.router.fleet.choose(decode, nil).lead == s.d[0].address })
	s.d[0].refusals["AllocateBlocks"] = []error{comeBack(300 * time.Millisecond)}
	begun := time.Now()
	s.served(t)
	if took := time.Since(begun); took < 300*time.Millisecond {
		t.Errorf("it came back after %v", took)
	}
	if s.d[0].called("PullBlocks") != 1 || s.d[1].called("PullBlocks") != 0 {
		t.Error("it went elsewhere")
	}
	s.atRest(t)
}

func TestATryThatFailedGivesItsBlocksBackBeforeTheNext(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	s.d[0].fails = []*pb.Failure{failing(pb.FailureReason_FAILURE_REASON_DATA_PATH_FAILED, retryHere)}
	s.served(t)
	s.atRest(t)
	calls := slices.DeleteFunc(s.d[0].calls, func(name string) bool { return !strings.HasSuffix(name, "Blocks") })
	if want := "AllocateBlocks PullBlocks FreeBlocks AllocateBlocks PullBlocks FreeBlocks"; strings.Join(calls, " ") != want {
		t.Errorf("%v", calls)
	}
}

func TestRetryOtherConsumerTakesTheSameGrantElsewhere(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			s := on(t, "pull", []string{kind}, []string{kind, kind})
			for _, d := range s.d[:] {
				d.fails = []*pb.Failure{failing(pb.FailureReason_FAILURE_REASON_NO_DATA_PATH, retryOther)}
			}
			first := s.router.fleet.choose(decode, nil)
			for _, d := range s.d {
				if d.address != first.lead {
					d.fails = nil
				}
			}
			s.served(t)
			if s.p[0].called("FinishedBlocks") > 1 || len(s.p[0].works)+len(s.p[0].bodies) != 1 {
				t.Error("it was prefilled again")
			}
			s.atRest(t)
		})
	}
}

func TestRecomputeIsServedByADecodeEngineWithoutKV(t *testing.T) {
	each(t, "pull", func(t *testing.T, s *stage) {
		s.d[0].fails = []*pb.Failure{lost}
		s.served(t)
		if works := s.d[0].works; len(works) > 0 && works[len(works)-1].ComputedTokens != 0 {
			t.Errorf("%+v", works)
		}
		if bodies := s.d[0].bodies; len(bodies) > 0 && bodies[len(bodies)-1]["kv_transfer_params"] != nil {
			t.Errorf("%v", bodies)
		}
		s.atRest(t)
	})
}

func TestAWrongRequestIsTheClients(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	for _, more := range []string{`, "prompt": "text"`, `, "max_tokens": 0`, `, "n": 2`, `, "stream": 1`} {
		if status, body, _ := s.ask(t.Context(), more); status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", more, status, body)
		}
	}
	if status, body, _ := s.chat(t.Context()); status != http.StatusBadRequest {
		t.Errorf("a chat, which engines without a tokenizer cannot read: %d %s", status, body)
	}
	if status, _, _ := s.send(t.Context(), "/v1/chat/completions", `{"prompt": [5]}`); status != http.StatusBadRequest {
		t.Errorf("a chat without messages: %d", status)
	}
	s.p[0].refusals["AllocateBlocks"] = []error{refusal(codes.OutOfRange, "LIMIT_EXCEEDED", "FIX_REQUEST")}
	status, body, _ := s.ask(t.Context(), "")
	if status != http.StatusBadRequest || !strings.Contains(body, "LIMIT_EXCEEDED") || s.p[0].called("AllocateBlocks") > 5 {
		t.Errorf("%d %s", status, body)
	}
	s.atRest(t)
}

func TestWhatAnEngineSaysOfAWrongRequestGoesToTheClient(t *testing.T) {
	s := on(t, "pull", []string{"relay"}, []string{"relay"})
	s.d[0].statuses = []int{http.StatusNotFound}
	status, body, _ := s.ask(t.Context(), "")
	if status != http.StatusNotFound || !strings.Contains(body, "the engine's own") {
		t.Errorf("%d %s", status, body)
	}
	s.atRest(t)
}

func TestAFailureThatNobodyUnderstandsIsNotRetried(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	s.d[0].refusals["PullBlocks"] = []error{refusal(codes.FailedPrecondition, "OF_A_LATER_VERSION", "RETRY_HERE")}
	status, _, _ := s.ask(t.Context(), "")
	if status != http.StatusBadGateway || s.d[0].called("PullBlocks") != 1 {
		t.Errorf("%d, after %d calls", status, s.d[0].called("PullBlocks"))
	}
	s.atRest(t)
}

func TestAnEngineThatFailsIsReplaced(t *testing.T) {
	for _, mode := range []string{"pull", "push"} {
		for _, kind := range kinds {
			t.Run(mode+" "+kind, func(t *testing.T) {
				s := on(t, mode, []string{kind, kind}, []string{kind, kind})
				for _, engines := range [][]*llm{s.p, s.d} {
					engines[0].statuses = []int{http.StatusInternalServerError}
					engines[1].set(func() { engines[1].free = 8 })
				}
				until(t, func() bool { return s.router.fleet.choose(decode, nil).lead == s.d[0].address })
				until(t, func() bool { return s.router.fleet.choose(prefill, nil).lead == s.p[0].address })
				s.served(t)
				s.atRest(t)
			})
		}
	}
}

func TestAStreamThatBeginsWithAnErrorHasNotBegun(t *testing.T) {
	s := on(t, "pull", []string{"relay"}, []string{"relay", "relay"})
	s.d[0].streamError, s.d[1].streamError = true, false
	s.d[1].set(func() { s.d[1].free = 8 })
	until(t, func() bool { return s.router.fleet.choose(decode, nil).lead == s.d[0].address })
	// The first engine has taken the KV, so the second one finds none and computes.
	status, body, err := s.ask(t.Context(), `, "stream": true`)
	if err != nil || status != http.StatusOK || strings.Contains(body, "error") {
		t.Errorf("%d %s %v", status, body, err)
	}
	s.atRest(t)
}

func TestHalfAnAnswerIsCutAndNotBegunAnew(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive", "drive"})
	s.d[0].cut, s.d[1].cut = true, true
	if _, body, err := s.ask(t.Context(), `, "stream": true`); err == nil {
		t.Errorf("it looks like a whole answer: %s", body)
	}
	if len(s.d[0].works)+len(s.d[1].works) != 1 {
		t.Error("it was tried again")
	}
	s.atRest(t)
}

func TestNobodyIsGivenWorkWhoDrainsOrCannotBeReached(t *testing.T) {
	s := on(t, "pull", []string{"drive", "drive"}, []string{"drive", "drive"})
	s.p[0].set(func() { s.p[0].admission = pb.Admission_ADMISSION_DRAINING })
	s.d[1].grpc.Stop()
	until(t, func() bool {
		for _, e := range s.router.fleet.engines {
			if (e.lead == s.p[0].address || e.lead == s.d[1].address) && e.takesWork() {
				return false
			}
		}
		return true
	})
	for range 3 {
		s.served(t)
	}
	if len(s.p[0].works)+len(s.d[1].works) > 0 || len(s.p[1].works) != 3 || len(s.d[0].works) != 3 {
		t.Error("they got work")
	}
	s.p[1].set(func() { s.p[1].admission = pb.Admission_ADMISSION_DRAINING })
	until(t, func() bool { return s.healthz(t) == http.StatusServiceUnavailable })
	if status, _, _ := s.ask(t.Context(), ""); status != http.StatusServiceUnavailable {
		t.Errorf("%d", status)
	}
	s.atRest(t)
}

func TestAnEngineThatDrainsMeanwhileIsReplacedWithTheSameGrant(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive", "drive"})
	draining := refusal(codes.FailedPrecondition, "DRAINING", "RETRY_OTHER_CONSUMER")
	first := s.world.leads[s.router.fleet.choose(decode, nil).lead]
	first.refusals["AllocateBlocks"] = []error{draining, draining}
	s.served(t)
	if len(s.p[0].works) != 1 || first.called("AllocateBlocks") != 1 {
		t.Error("it was prefilled again, or the engine was asked again")
	}
	s.atRest(t)
}
