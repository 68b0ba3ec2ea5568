package main

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

var kinds = []string{"drive", "relay"}

// each runs a test for every pair of kinds, because a grant goes from any engine to any other.
func each(t *testing.T, mode string, test func(*testing.T, *stage)) {
	for _, p := range kinds {
		for _, d := range kinds {
			t.Run(mode+" from "+p+" to "+d, func(t *testing.T) { test(t, on(t, mode, []string{p}, []string{d})) })
		}
	}
}

func TestEveryPairOfEnginesServesByPullAndByPushAndKeepsNothing(t *testing.T) {
	for _, mode := range []string{"pull", "push"} {
		each(t, mode, func(t *testing.T, s *stage) {
			s.served(t)
			s.atRest(t)
			for _, e := range []*llm{s.p[0], s.d[0]} {
				if e.called("CancelTransfer") > 0 {
					t.Error("a request that was served is cancelled")
				}
			}
		})
	}
}

func TestAStreamIsRelayedToItsEnd(t *testing.T) {
	each(t, "pull", func(t *testing.T, s *stage) {
		status, body, err := s.ask(t.Context(), `, "stream": true`)
		if err != nil || status != http.StatusOK || strings.Count(body, "data: {") < 2 ||
			!strings.HasSuffix(body, "data: [DONE]\n\n") {
			t.Errorf("%d %q %v", status, body, err)
		}
		s.atRest(t)
	})
}

func TestADrivenEngineComputesInTheBlocksThatWereAllocated(t *testing.T) {
	s := on(t, "pull", []string{"drive"}, []string{"drive"})
	s.served(t)
	p, d := s.p[0].works[0], s.d[0].works[0]
	if p.MaxTokens != 0 || p.ComputedTokens != 0 || len(p.TokenIDs) != len(prompt) {
		t.Errorf("P: %+v", p)
	}
	if d.MaxTokens != 2 || d.ComputedTokens != len(prompt) {
		t.Errorf("D: %+v", d)
	}
	if !strings.Contains(string(p.Blocks), "allocationId") || !strings.Contains(string(p.Blocks), "incarnation") {
		t.Errorf("blocks are named by the whole message: %s", p.Blocks)
	}
}

func TestARelayedEngineGetsAnIntentAndWhatTheOtherSaidUnread(t *testing.T) {
	s := on(t, "pull", []string{"relay"}, []string{"relay"})
	s.served(t)
	p, d := s.p[0].bodies[0], s.d[0].bodies[0]
	if string(p["max_tokens"]) != "1" || string(d["max_tokens"]) != "2" {
		t.Errorf("%s %s", p["max_tokens"], d["max_tokens"])
	}
	var intent struct {
		Params struct {
			Intent map[string]any `json:"kvgrpc_intent"`
		} `json:"kv_transfer_params"`
	}
	whole, _ := json.Marshal(p)
	_ = json.Unmarshal(whole, &intent)
	given := intent.Params.Intent
	if given["mode"] != "TRANSFER_MODE_PULL" || given["ttl"] != "30s" || given["onAbort"] != "ON_ABORT_KEEP" ||
		len(given["transferKey"].(string)) != 24 {
		t.Errorf("%v", given)
	}
	if !strings.Contains(string(d["kv_transfer_params"]), `"anything":"else"`) {
		t.Errorf("%s", d["kv_transfer_params"])
	}
}

func TestAChatGoesToRelayedEnginesByItsOwnPath(t *testing.T) {
	for _, mode := range []string{"pull", "push"} {
		s := on(t, mode, []string{"relay"}, []string{"relay"})
		if status, body, err := s.chat(t.Context()); err != nil || status != http.StatusOK {
			t.Fatalf("%d %s %v", status, body, err)
		}
		for _, e := range []*llm{s.p[0], s.d[0]} {
			if e.paths[0] != "/v1/chat/completions" || len(e.bodies[0]["messages"]) == 0 {
				t.Errorf("%s %v", e.paths[0], e.bodies[0])
			}
		}
		s.atRest(t)
	}
}

func TestAClientSeesNoGrantAndSetsNoParams(t *testing.T) {
	s := on(t, "pull", []string{"relay"}, []string{"relay"})
	_, body, _ := s.ask(t.Context(), `, "kv_transfer_params": {"kvgrpc_grant": "bWluZQ=="}`)
	if strings.Contains(body, "kv_transfer_params") {
		t.Error(body)
	}
	if strings.Contains(string(s.p[0].bodies[0]["kv_transfer_params"]), "bWluZQ") {
		t.Errorf("%s", s.p[0].bodies[0]["kv_transfer_params"])
	}
}

func TestAnAnswerDoesNotWaitForALookAtItsTransfer(t *testing.T) {
	for _, more := range []string{"", `, "stream": true`} {
		s := on(t, "pull", []string{"relay"}, []string{"relay"})
		s.d[0].lists = make(chan struct{})
		begun := time.Now()
		status, body, err := s.ask(t.Context(), more)
		if took := time.Since(begun); status != http.StatusOK || err != nil || took > time.Second {
			t.Errorf("%d %s %v after %v", status, body, err, took)
		}
		close(s.d[0].lists)
		s.atRest(t)
		if s.d[0].called("ListTransfers") != 1 {
			t.Error("it did not look")
		}
	}
}

func TestOneTraceGoesOnToEnginesAndLeads(t *testing.T) {
	flush, err := startTracing(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer flush()
	each(t, "pull", func(t *testing.T, s *stage) {
		const trace = "0af7651916cd43dd8448eb211c80319c"
		request, _ := http.NewRequest(http.MethodPost, s.url+"/v1/completions",
			strings.NewReader(`{"prompt": [1, 2, 3], "max_tokens": 2}`))
		request.Header.Set("Traceparent", "00-"+trace+"-b7ad6b7169203331-01")
		reply, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, reply.Body)
		reply.Body.Close()
		s.router.ending.Wait()
		for _, e := range []*llm{s.p[0], s.d[0]} {
			seen := append(e.traces, e.lead.traces...)
			for _, traceparent := range seen {
				if strings.Split(traceparent, "-")[1] != trace {
					t.Errorf("%s", traceparent)
				}
			}
			if len(e.traces) == 0 || (len(e.lead.traces) == 0 && e == s.d[0]) {
				t.Errorf("%v", seen)
			}
		}
	})
}
