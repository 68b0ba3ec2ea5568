package main

import (
	"encoding/json"
	"math"
	"net/http"
	"time"
)

// These are the paths of requests, at this router and at engines.
const (
	completions = "/v1/completions"
	chats       = "/v1/chat/completions"
)

// request is one completion, or one answer of a chat.
type request struct {
	id string
	// path and header are those that engines get.
	path   string
	header http.Header
	// body is the client's body by field. Only the fields below are read.
	body   map[string]json.RawMessage
	stream bool
	// ttl is how long a prompt's KV waits for its decode engine.
	ttl    time.Duration
	answer *answer

	attempts int
	// avoid are the engines that have failed the request.
	avoid map[*engine]bool
	// pair has the engines that were picked for the request.
	pair map[role]*engine
}

// newRequest reads a request. It must be an object with a prompt or, for a chat, with messages.
func newRequest(id string, from *http.Request, body []byte, answer *answer) (*request, error) {
	r := &request{id: id, path: from.URL.Path, header: http.Header{}, answer: answer}
	r.avoid, r.pair = map[*engine]bool{}, map[role]*engine{}
	if given := from.Header.Get("Authorization"); given != "" {
		r.header.Set("Authorization", given)
	}
	r.header.Set("Content-Type", "application/json")
	if err := json.Unmarshal(body, &r.body); err != nil {
		return nil, wrong("the body is no JSON object: %w", err)
	}
	asks := "prompt"
	if r.path == chats {
		asks = "messages"
	}
	if _, ok := r.body[asks]; !ok {
		return nil, wrong("there is no %s", asks)
	}
	if err := r.read("stream", &r.stream); err != nil {
		return nil, err
	}
	// Only the router states what the engines tell each other.
	delete(r.body, "kv_transfer_params")
	return r, nil
}

// read reads a field, if it is there.
func (r *request) read(name string, into any) error {
	value, ok := r.body[name]
	if !ok {
		return nil
	}
	if err := json.Unmarshal(value, into); err != nil {
		return wrong("%s: %w", name, err)
	}
	return nil
}

// with returns the body with the given fields set, and without some others.
func (r *request) with(fields map[string]any, without ...string) ([]byte, error) {
	body := make(map[string]any, len(r.body)+len(fields))
	for name, value := range r.body {
		body[name] = value
	}
	for _, name := range without {
		delete(body, name)
	}
	for name, value := range fields {
		body[name] = value
	}
	return json.Marshal(body)
}

// prompt returns the token ids. A driven engine needs them, because it has no tokenizer.
func (r *request) prompt() ([]uint32, error) {
	if r.path == chats {
		return nil, wrong("a chat is for engines with a tokenizer: this one is driven")
	}
	var ids []uint32
	if err := json.Unmarshal(r.body["prompt"], &ids); err != nil || len(ids) == 0 {
		return nil, wrong("prompt is a list of token ids, not empty")
	}
	return ids, nil
}

// maxTokens returns the largest number of tokens that the client wants.
func (r *request) maxTokens() (int, error) {
	wanted, answers := 16, 1
	if err := r.read("max_tokens", &wanted); err != nil {
		return 0, err
	}
	if err := r.read("n", &answers); err != nil {
		return 0, err
	}
	if wanted < 1 || wanted > math.MaxInt32 || answers != 1 {
		return 0, wrong("max_tokens is at least 1, and n is 1")
	}
	return wanted, nil
}
