package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// bodyMax bounds the body of a request, in bytes. A million tokens take about 8 MB.
const bodyMax = 32 << 20

// router serves completions.
type router struct {
	options options
	fleet   *fleet
	// ending counts the clean-ups that are under way.
	ending   sync.WaitGroup
	draining atomic.Bool
}

func newRouter(o options) (*router, error) {
	fleet, err := join(o)
	if err != nil {
		return nil, err
	}
	return &router{options: o, fleet: fleet}, nil
}

// drain makes /healthz report that no more requests are wanted.
func (r *router) drain() { r.draining.Store(true) }

// close returns when everything is cleaned up. No request may be under way.
func (r *router) close() {
	r.ending.Wait()
	r.fleet.leave()
}

func (r *router) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+completions, r.completions)
	mux.HandleFunc("POST "+chats, r.completions)
	mux.HandleFunc("GET /healthz", r.healthz)
	return mux
}

// completions serves one request. Its context, and with it all calls for the request, ends when the client hangs up.
func (r *router) completions(w http.ResponseWriter, from *http.Request) {
	begun, id := time.Now(), "cmpl-"+rand.Text()
	ctx, span := startRequest(from, id)
	ctx, cancel := context.WithTimeout(ctx, r.options.timeout)
	defer cancel()
	answer := &answer{writer: w}
	err := r.complete(ctx, id, from, answer)
	endStep(span, err)
	slog.Info("a request", "request", id, "ms", time.Since(begun).Milliseconds(), "error", err)
	if err == nil {
		return
	}
	// The context may also have ended with the router while the client is still there.
	if answer.begun() {
		panic(http.ErrAbortHandler) // cuts the connection: half an answer must not look like a whole one
	}
	refuse(w, id, err)
}

func (r *router) complete(ctx context.Context, id string, from *http.Request, answer *answer) error {
	body, err := io.ReadAll(http.MaxBytesReader(answer.writer, from.Body, bodyMax))
	if err != nil {
		return wrong("the body: %w", err)
	}
	request, err := newRequest(id, from, body, answer)
	if err != nil {
		return err
	}
	request.ttl = r.options.ttl
	if r.options.mode == "push" {
		err = r.push(ctx, request)
	} else {
		err = r.pull(ctx, request)
	}
	if nextOf(err) == recompute && !answer.begun() {
		slog.Info("its KV is lost", "request", id, "error", err)
		err = r.alone(ctx, request)
	}
	return err
}

// refuse answers a request that has no answer yet.
func refuse(w http.ResponseWriter, id string, err error) {
	status, message := http.StatusBadGateway, "the request "+id+" could not be served"
	var f *failure
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		status = http.StatusGatewayTimeout
	case errors.Is(err, context.Canceled): // the router ends, or nobody reads this
		status = http.StatusServiceUnavailable
		w.Header().Set("Retry-After", "1")
	case !errors.As(err, &f):
	case f.next == fixRequest && f.body != nil: // an engine has reported what is wrong
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(f.status)
		_, _ = w.Write(f.body)
		return
	case f.next == fixRequest:
		status, message = http.StatusBadRequest, f.err.Error()
	case f.next == retryHere || f.next == retryOther:
		status = http.StatusServiceUnavailable
		w.Header().Set("Retry-After", strconv.Itoa(max(1, int(math.Ceil(f.delay.Seconds())))))
	}
	write(w, status, map[string]any{"error": map[string]any{"message": message, "code": status}})
}

// healthz reports the state of the engines: 200 while each role has an engine that takes work.
func (r *router) healthz(w http.ResponseWriter, _ *http.Request) {
	status := http.StatusOK
	if r.draining.Load() {
		status = http.StatusServiceUnavailable
	}
	for _, role := range []role{prefill, decode} {
		if r.fleet.choose(role, nil) == nil {
			status = http.StatusServiceUnavailable
		}
	}
	rows := []map[string]any{}
	for _, e := range r.fleet.all() {
		rows = append(rows, e.row())
	}
	write(w, status, map[string]any{"draining": r.draining.Load(), "engines": rows})
}

func (e *engine) row() map[string]any {
	load := e.load()
	e.mu.Lock()
	defer e.mu.Unlock()
	row := map[string]any{
		"role": e.role, "kind": e.kind, "url": e.url, "lead": e.lead, "engine_id": e.engineID, "underway": e.underway,
		"takes_work": load.takesWork, "free_blocks": load.free,
	}
	if e.status == nil {
		row["unreachable"] = "nothing heard yet"
		if e.unreachable != nil {
			row["unreachable"] = e.unreachable.Error()
		}
	} else {
		row["admission"] = e.status.Admission.String()
		row["admission_reason"] = e.status.AdmissionReason
	}
	return row
}

func write(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}
