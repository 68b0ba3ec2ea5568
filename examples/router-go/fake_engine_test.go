package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// soon is how long a test waits for what must come. Only a test that fails waits so long.
const soon = 20 * time.Second

// llm is a fake engine behind a fake lead. It can be driven (/compute), and has its own scheduler (/v1/completions).
type llm struct {
	*lead
	http *httptest.Server

	mu     sync.Mutex
	traces []string
	works  []work
	bodies []map[string]json.RawMessage
	paths  []string
	// statuses are those of the next answers, the first one first; an answer without one gets 200.
	statuses []int
	// streamError makes the next stream begin with an error.
	streamError bool
	// cut makes the next answer break off after its first token.
	cut bool
	// stalls makes answers break off after their first token, when the caller leaves.
	stalls bool
	// running are computations that may write their blocks. stopped are computations that must not, any more or at all.
	running map[string]chan struct{}
	stopped map[string]bool
	// lingers makes computations write their blocks until it is closed, whatever happens to their connections.
	lingers chan struct{}
	// unstoppable means that the engine has no DELETE /compute.
	unstoppable bool
	// waits makes answers wait until it is closed, or until the caller leaves. `came` gets one value for each that
	// waits.
	waits, came chan struct{}
}

func (w *world) newLLM(t *testing.T) *llm {
	t.Helper()
	e := &llm{
		lead: w.newLead(t), came: make(chan struct{}, 16), running: map[string]chan struct{}{}, stopped: map[string]bool{},
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /compute", e.compute)
	mux.HandleFunc("DELETE /compute/{id}", e.stop)
	mux.HandleFunc("POST /v1/completions", e.completions)
	mux.HandleFunc("POST /v1/chat/completions", e.completions)
	e.http = httptest.NewServer(mux)
	t.Cleanup(e.http.Close)
	return e
}

// token returns a made-up next token of a prompt. It depends on the whole prompt and on the place.
func token(ids []uint32, place int) uint32 {
	sum := uint32(place)
	for _, id := range ids {
		sum = sum*31 + id
	}
	return sum % 1000
}

// admit records a request and answers with the status that the test wants. It returns false when that was the answer.
func (e *llm) admit(w http.ResponseWriter, r *http.Request) (body []byte, ok bool) {
	body, _ = io.ReadAll(r.Body)
	e.mu.Lock()
	e.traces = append(e.traces, r.Header.Get("Traceparent"))
	status, waits := http.StatusOK, e.waits
	if len(e.statuses) > 0 {
		status, e.statuses = e.statuses[0], e.statuses[1:]
	}
	e.mu.Unlock()
	if waits != nil {
		e.came <- struct{}{}
		select {
		case <-waits:
		case <-r.Context().Done():
			return nil, false
		}
	}
	if status != http.StatusOK {
		w.WriteHeader(status)
		fmt.Fprint(w, `{"error": {"message": "the engine's own"}}`)
		return nil, false
	}
	return body, true
}

func (e *llm) compute(w http.ResponseWriter, r *http.Request) {
	said, _ := io.ReadAll(r.Body)
	r.Body = io.NopCloser(bytes.NewReader(said))
	var asked work
	_ = json.Unmarshal(said, &asked)
	if !e.start(asked.ID) {
		w.WriteHeader(http.StatusGone)
		return
	}
	defer e.end(asked.ID)
	if _, ok := e.admit(w, r); !ok {
		return
	}
	e.mu.Lock()
	e.works = append(e.works, asked)
	cut, stalls := e.cut && asked.MaxTokens > 0, e.stalls
	e.mu.Unlock()
	lines := json.NewEncoder(w)
	for place := range asked.MaxTokens {
		id := token(asked.TokenIDs, place)
		_ = lines.Encode(progress{TokenID: &id})
		_ = http.NewResponseController(w).Flush()
		if stalls {
			<-r.Context().Done()
			return
		}
		if cut {
			panic(http.ErrAbortHandler)
		}
	}
	_ = lines.Encode(progress{FinishReason: "length"})
}

// start returns false for a computation that was stopped before it arrived.
func (e *llm) start(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped[id] {
		return false
	}
	e.running[id] = make(chan struct{})
	return true
}

func (e *llm) end(id string) {
	e.mu.Lock()
	over, lingers := e.running[id], e.lingers
	e.mu.Unlock()
	if lingers == nil {
		close(over)
		return
	}
	go func() {
		<-lingers
		close(over)
	}()
}

func (e *llm) stop(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	e.mu.Lock()
	over, unstoppable := e.running[id], e.unstoppable
	e.stopped[id] = true
	e.mu.Unlock()
	if unstoppable {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	if over != nil {
		select {
		case <-over:
		case <-r.Context().Done():
			return
		}
	}
	w.WriteHeader(http.StatusNoContent)
}

// told returns how many computations the engine was told to stop.
func (e *llm) told() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.stopped)
}

// completions does what an engine with kvgrpc's connector does, as far as a router can see it.
func (e *llm) completions(w http.ResponseWriter, r *http.Request) {
	body, ok := e.admit(w, r)
	if !ok {
		return
	}
	fields := map[string]json.RawMessage{}
	_ = json.Unmarshal(body, &fields)
	e.mu.Lock()
	e.bodies = append(e.bodies, fields)
	e.paths = append(e.paths, r.URL.Path)
	e.mu.Unlock()
	var params struct {
		Prefills bool            `json:"do_remote_decode"`
		Decodes  bool            `json:"do_remote_prefill"`
		Grant    json.RawMessage `json:"kvgrpc_grant"`
		Intent   json.RawMessage `json:"kvgrpc_intent"`
	}
	var intent pb.Intent
	if json.Unmarshal(fields["kv_transfer_params"], &params) == nil {
		if err := protojson.Unmarshal(params.Intent, &intent); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	switch err := e.transfer(r.Context(), params.Prefills, params.Decodes, params.Grant, &intent); {
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	case params.Prefills:
		given, _ := json.Marshal(map[string]any{
			"do_remote_prefill": true, "kvgrpc_grant": intent.TransferKey, "anything": "else",
		})
		fmt.Fprintf(w, `{"choices": [{"token_ids": [1]}], "kv_transfer_params": %s}`, given)
	default:
		e.answer(w, fields)
	}
}

// transfer moves the KV through this engine's own calls to its lead.
func (e *llm) transfer(ctx context.Context, prefills, decodes bool, token json.RawMessage, intent *pb.Intent) error {
	pushes := intent.Mode == pb.TransferMode_TRANSFER_MODE_PUSH
	switch {
	case prefills:
		finished := &pb.FinishedBlocksRequest{TransferKey: intent.TransferKey}
		if pushes {
			finished.Job = &pb.FinishedBlocksRequest_Part{Part: &pb.PushPart{Last: true}}
		}
		_, err := e.FinishedBlocks(ctx, finished)
		return err
	case !decodes:
		return nil
	case pushes:
		reserved, err := e.ReserveBlocks(ctx, &pb.ReserveBlocksRequest{
			TransferKey: intent.TransferKey, RequestId: intent.RequestId,
		})
		if err != nil {
			return err
		}
		source := e.world.leads[intent.Peer.Address]
		if _, err := source.RegisterPush(ctx, &pb.RegisterPushRequest{Grant: reserved.Grant}); err != nil {
			return err
		}
		return e.wait(ctx, reserved.Transfer)
	default:
		grant, err := (&handOver{params: params{"kvgrpc_grant": token}}).forDrive()
		if err != nil {
			return err
		}
		pull, err := e.PullBlocks(ctx, &pb.PullBlocksRequest{
			Pull:        &pb.PullBlocksRequest_Grant{Grant: grant},
			TransferKey: intent.TransferKey, RequestId: intent.RequestId,
		})
		if err != nil {
			return err
		}
		return e.wait(ctx, pull.Transfer)
	}
}

func (e *llm) wait(ctx context.Context, transfer *pb.Transfer) error {
	reply, err := e.WaitTransfer(ctx, &pb.WaitTransferRequest{TransferId: transfer.TransferId})
	if err != nil {
		return err
	}
	if reply.Transfer.Failure != nil {
		return fmt.Errorf("the KV did not come: %v", reply.Transfer.Failure)
	}
	return nil
}

func (e *llm) answer(w http.ResponseWriter, fields map[string]json.RawMessage) {
	var ids []uint32
	_ = json.Unmarshal(fields["prompt"], &ids)
	if string(fields["stream"]) != "true" {
		fmt.Fprintf(w, `{"choices": [{"token_ids": [%d, %d]}], "kv_transfer_params": {"kvgrpc_grant": "c2VjcmV0"}}`,
			token(ids, 0), token(ids, 1))
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	e.mu.Lock()
	failing := e.streamError
	e.streamError = false
	e.mu.Unlock()
	if failing {
		fmt.Fprint(w, "data: {\"error\": {\"message\": \"its KV did not come\"}}\n\ndata: [DONE]\n\n")
		return
	}
	for place := range 2 {
		fmt.Fprintf(w, "data: {\"choices\": [{\"token_ids\": [%d]}]}\n\n", token(ids, place))
	}
	fmt.Fprint(w, "data: [DONE]\n\n")
}

// stage is a router in front of fakes.
type stage struct {
	*world
	p, d   []*llm
	router *router
	url    string
}

// on starts engines and a router. The kinds of prefill and decode engines are "drive" or "relay".
func on(t *testing.T, mode string, prefills, decodes []string) *stage {
	t.Helper()
	s := &stage{world: newWorld()}
	arguments := []string{"-mode", mode}
	for _, group := range []struct {
		flag  string
		kinds []string
		into  *[]*llm
	}{{"-prefill", prefills, &s.p}, {"-decode", decodes, &s.d}} {
		for _, kind := range group.kinds {
			e := s.newLLM(t)
			*group.into = append(*group.into, e)
			arguments = append(arguments, group.flag, kind+","+e.http.URL+","+e.address)
		}
	}
	o, err := parse(arguments)
	if err != nil {
		t.Fatal(err)
	}
	o.lifeGrace = 200 * time.Millisecond
	if s.router, err = newRouter(o); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(s.router.handler())
	s.url = server.URL
	t.Cleanup(func() {
		server.Close()
		s.router.close()
	})
	until(t, func() bool {
		return !slices.ContainsFunc(s.router.fleet.engines, func(e *engine) bool { return !e.takesWork() })
	})
	return s
}

func (s *stage) healthz(t *testing.T) int {
	reply, err := http.Get(s.url + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close()
	return reply.StatusCode
}

var prompt = []uint32{5, 6, 7, 8, 9, 10}

// ask sends a request. When its context ends early, the client hangs up.
func (s *stage) ask(ctx context.Context, more string) (status int, body string, err error) {
	ids, _ := json.Marshal(prompt)
	return s.send(ctx, "/v1/completions", fmt.Sprintf(`{"model": "tiny", "prompt": %s, "max_tokens": 2%s}`, ids, more))
}

// chat sends one message of a conversation.
func (s *stage) chat(ctx context.Context) (status int, body string, err error) {
	messages := `[{"role": "user", "content": "hello"}]`
	return s.send(ctx, "/v1/chat/completions", fmt.Sprintf(`{"model": "tiny", "messages": %s, "max_tokens": 2}`, messages))
}

func (s *stage) send(ctx context.Context, path, text string) (status int, body string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+path, strings.NewReader(text))
	if err != nil {
		return 0, "", err
	}
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer reply.Body.Close()
	said, err := io.ReadAll(reply.Body)
	return reply.StatusCode, string(said), err
}

// served sends a request, and expects the right tokens.
func (s *stage) served(t *testing.T) {
	t.Helper()
	status, body, err := s.ask(t.Context(), "")
	var whole struct {
		Choices []struct {
			TokenIDs []uint32 `json:"token_ids"`
		}
	}
	_ = json.Unmarshal([]byte(body), &whole)
	if err != nil || status != http.StatusOK || len(whole.Choices) != 1 ||
		!slices.Equal(whole.Choices[0].TokenIDs, []uint32{token(prompt, 0), token(prompt, 1)}) {
		t.Fatalf("%d %s %v", status, body, err)
	}
}

// atRest waits until nothing is left at any lead.
func (s *stage) atRest(t *testing.T) {
	t.Helper()
	s.router.ending.Wait()
	for _, e := range append(slices.Clone(s.p), s.d...) {
		if left := e.holding(); len(left) > 0 {
			t.Errorf("left at %s: %v", e.address, left)
		}
	}
}

func until(t *testing.T, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(soon); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not come")
		}
	}
}

func next(t *testing.T, from <-chan struct{}) {
	t.Helper()
	select {
	case <-from:
	case <-time.After(soon):
		t.Fatal("nothing came")
	}
}
