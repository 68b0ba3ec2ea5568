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

// work is what a driven engine is asked to compute, as `POST /compute`: the KV of the tokens from computed_tokens on,
// in these blocks; then max_tokens more, one after the other. `DELETE /compute/{id}` ends it: it is answered, with 204,
// once the engine writes the blocks no more, and never will, also where the computation has not come yet.
type work struct {
	// ID is another one for each computation.
	ID       string   `json:"id"`
	TokenIDs []uint32 `json:"token_ids"`
	// ComputedTokens have their KV in the blocks. When that is all of them the engine computes the last one again, since
	// it needs what follows from it.
	ComputedTokens int `json:"computed_tokens"`
	MaxTokens      int `json:"max_tokens"`
	// Blocks is a message kvgrpc.v1.Blocks, as JSON.
	Blocks json.RawMessage `json:"blocks"`
}

// progress is one line of the answer. The last line has a finish_reason; without it the answer was cut.
type progress struct {
	TokenID      *uint32 `json:"token_id,omitempty"`
	FinishReason string  `json:"finish_reason,omitempty"`
}

// stopTimeout bounds how long an engine may go on computing before its blocks are left to their time.
const stopTimeout = 10 * time.Second

// compute has an engine compute, and answers the client with the tokens, if any are asked for. The blocks count as
// written until the engine's answer has come to its end: an engine need not notice at once that a connection is cut.
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

// refusedWork says whether an engine has answered that it does not compute. A 5xx may be that of a proxy, behind which
// the engine goes on.
func refusedWork(err error) bool {
	var f *failure
	return errors.As(err, &f) && f.status >= 400 && f.status < 500
}

// stop ends a computation. Without an error its engine writes the blocks no more.
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

// engines is for calls to all engines. Waiting for an answer is bounded by the request's context only.
var engines = &http.Client{Transport: newTransport()}

func newTransport() *http.Transport {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Proxy = nil
	transport.MaxIdleConnsPerHost = 64
	return transport
}

// post sends a request to an engine, with the trace, and returns its answer if that is 200.
func post(ctx context.Context, to *engine, path string, a *attempt, body []byte) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, to.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header = a.header.Clone()
	request.Header.Set("Content-Type", "application/json")
	// Another one each time: the engine may still know the try before.
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
