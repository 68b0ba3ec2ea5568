package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// work is what a driven engine is asked to compute, as `POST /compute`. It computes the KV of the tokens from
// computed_tokens on into these blocks, and then max_tokens more tokens, one after the other. `DELETE /compute/{id}`
// ends it. The engine answers that with 204 once it no longer writes the blocks and never will, even where the
// computation has not arrived yet.
type work struct {
	// ID is unique for each computation.
	ID       string   `json:"id"`
	TokenIDs []uint32 `json:"token_ids"`
	// ComputedTokens have their KV in the blocks. When those are all tokens, the engine computes the last one again,
	// because it needs the output of that token.
	ComputedTokens int `json:"computed_tokens"`
	MaxTokens      int `json:"max_tokens"`
	// Blocks is a message kvgrpc.v1.Blocks as JSON.
	Blocks json.RawMessage `json:"blocks"`
}

// progress is one line of the answer. The last line has a finish_reason; an answer without it was cut.
type progress struct {
	TokenID      *uint32 `json:"token_id,omitempty"`
	FinishReason string  `json:"finish_reason,omitempty"`
}

// stopTimeout bounds how long an engine may continue to compute. After that its blocks are left to their TTL.
const stopTimeout = 10 * time.Second

// compute lets an engine compute, and sends the client the tokens, if any were asked for. The blocks count as written
// until the engine's answer has ended, because an engine may notice late that a connection was cut.
func (d *driven) compute(ctx context.Context, a *attempt, work work, blocks *pb.Blocks) (err error) {
	work.ID = rand.Text()
	if work.Blocks, err = protojson.Marshal(blocks); err != nil {
		return err
	}
	body, err := json.Marshal(work)
	if err != nil {
		return err
	}
	a.write(d.engine, blocks.AllocationId, work.ID)
	reply, err := post(ctx, d.engine, "/compute", a, body)
	if err != nil {
		if refusedWork(err) {
			a.write(d.engine, blocks.AllocationId, "")
		}
		return err
	}
	defer reply.Body.Close()
	tokens, add := newTokens(a, len(work.TokenIDs)), func(uint32) error { return nil }
	if work.MaxTokens > 0 {
		add = tokens.add
	}
	finish, err := d.follow(ctx, reply.Body, add)
	if err != nil {
		return err
	}
	a.write(d.engine, blocks.AllocationId, "")
	if work.MaxTokens == 0 {
		return nil
	}
	return tokens.finish(finish)
}

// refusedWork reports whether an engine has answered that it does not compute. A 5xx does not say so: it may come from
// a proxy in front of an engine that continues.
func refusedWork(err error) bool {
	var f *failure
	return errors.As(err, &f) && f.status >= 400 && f.status < 500
}

// stop ends a computation. When it returns no error, the engine no longer writes the blocks.
func stop(ctx context.Context, at *engine, a *attempt, computation string) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodDelete, at.url+"/compute/"+computation, nil)
	if err != nil {
		return err
	}
	request.Header = a.header.Clone()
	reply, err := engines.Do(request)
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusNoContent {
		return fmt.Errorf("HTTP %s", reply.Status)
	}
	return nil
}

// follow reads an answer line by line.
func (d *driven) follow(ctx context.Context, body io.Reader, each func(uint32) error) (finish string, err error) {
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		var line progress
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return "", unanswered(ctx, d.engine, "/compute", err)
		}
		if line.TokenID != nil {
			if err := each(*line.TokenID); err != nil {
				return "", err
			}
		}
		if line.FinishReason != "" {
			return line.FinishReason, nil
		}
	}
	if err = lines.Err(); err == nil {
		err = io.ErrUnexpectedEOF
	}
	return "", unanswered(ctx, d.engine, "/compute", err)
}

// engines is the HTTP client for calls to all engines. Only the request's context bounds the wait for an answer.
var engines = &http.Client{Transport: newTransport()}

func newTransport() *http.Transport {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Proxy = nil
	transport.MaxIdleConnsPerHost = 64
	return transport
}

// post sends a request with its trace to an engine, and returns the answer if its status is 200.
func post(ctx context.Context, to *engine, path string, a *attempt, body []byte) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, to.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header = a.header.Clone()
	request.Header.Set("Content-Type", "application/json")
	// The id is new for each try, because the engine may still know the previous try.
	request.Header.Set("X-Request-Id", a.id+"-"+rand.Text()[:6])
	if trace := traceparent(ctx); trace != "" {
		request.Header.Set("Traceparent", trace)
	}
	reply, err := engines.Do(request)
	if err != nil {
		return nil, unanswered(ctx, to, path, err)
	}
	if reply.StatusCode == http.StatusOK {
		return reply, nil
	}
	defer reply.Body.Close()
	said, err := io.ReadAll(io.LimitReader(reply.Body, 64<<10))
	if err != nil {
		said = fmt.Appendf(said, " (%v)", err)
	}
	return nil, answered(to, path, reply, said)
}
