package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// answer is the response to the client. Once it has begun, no other engine can begin it again.
type answer struct {
	writer http.ResponseWriter
	sent   atomic.Bool
}

func (a *answer) begun() bool { return a.sent.Load() }

// begin sends the status and the content type, unless that has been done.
func (a *answer) begin(contentType string) {
	if !a.sent.Swap(true) {
		a.writer.Header().Set("Content-Type", contentType)
		a.writer.WriteHeader(http.StatusOK)
	}
}

// write sends bytes at once. An error here is not the engine's: the client is gone, and the request's context ends.
func (a *answer) write(data []byte) error {
	if _, err := a.writer.Write(data); err != nil {
		return err
	}
	return http.NewResponseController(a.writer).Flush()
}

// relay sends an engine's answer as it comes. It calls `first` when the first token is there.
func (a *answer) relay(reply *http.Response, first func()) error {
	contentType := reply.Header.Get("Content-Type")
	if strings.HasPrefix(contentType, "text/event-stream") {
		return a.relayEvents(contentType, reply.Body, first)
	}
	body, err := io.ReadAll(reply.Body)
	if err != nil {
		return err
	}
	first()
	a.begin(contentType)
	return a.write(withoutParams(body))
}

// relayEvents sends an event stream. A stream whose first event is an error counts as not begun.
func (a *answer) relayEvents(contentType string, body io.Reader, first func()) error {
	lines := bufio.NewReader(body)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 && a.begun() {
			return nil
		}
		if err != nil {
			return err
		}
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok && !a.begun() {
			if isError(data) {
				return fmt.Errorf("%.512s", data)
			}
			first()
			a.begin(contentType)
		}
		if a.begun() {
			if err := a.write(line); err != nil {
				return err
			}
		}
	}
}

func isError(data []byte) bool {
	var event struct{ Error json.RawMessage }
	return json.Unmarshal(data, &event) == nil && event.Error != nil
}

// withoutParams returns an answer without `kv_transfer_params`, because a grant is for engines and not for clients.
func withoutParams(body []byte) []byte {
	var whole map[string]json.RawMessage
	if json.Unmarshal(body, &whole) != nil || whole["kv_transfer_params"] == nil {
		return body
	}
	delete(whole, "kv_transfer_params")
	if cut, err := json.Marshal(whole); err == nil {
		return cut
	}
	return nil
}

// tokens makes the answer from token ids, for engines that return nothing else.
type tokens struct {
	*attempt
	promptTokens int
	created      int64
	model        string
	ids          []uint32
}

func newTokens(a *attempt, promptTokens int) *tokens {
	t := &tokens{attempt: a, promptTokens: promptTokens, created: time.Now().Unix(), ids: []uint32{}}
	_ = json.Unmarshal(a.body["model"], &t.model)
	return t
}

func (t *tokens) add(id uint32) error {
	t.ids = append(t.ids, id)
	if !t.stream {
		return nil
	}
	return t.event([]uint32{id}, nil)
}

func (t *tokens) finish(reason string) error {
	if t.stream {
		if err := t.event([]uint32{}, &reason); err != nil {
			return err
		}
		return t.answer.write([]byte("data: [DONE]\n\n"))
	}
	whole := t.completion(t.ids, &reason)
	made := len(t.ids)
	whole["usage"] = map[string]int{
		"prompt_tokens": t.promptTokens, "completion_tokens": made, "total_tokens": t.promptTokens + made,
	}
	body, err := json.Marshal(whole)
	if err != nil {
		return err
	}
	t.answer.begin("application/json")
	return t.answer.write(body)
}

func (t *tokens) event(ids []uint32, reason *string) error {
	body, err := json.Marshal(t.completion(ids, reason))
	if err != nil {
		return err
	}
	t.answer.begin("text/event-stream")
	return t.answer.write(fmt.Appendf(nil, "data: %s\n\n", body))
}

func (t *tokens) completion(ids []uint32, reason *string) map[string]any {
	return map[string]any{
		"id": t.request.id, "object": "text_completion", "created": t.created, "model": t.model,
		"choices": []any{map[string]any{"index": 0, "text": "", "token_ids": ids, "finish_reason": reason}},
	}
}
