// Conformance is the Go executor of the conformance suite. It reads one request a line from standard input, carries it
// out with the client as a user would, and writes one answer a line to standard output. It knows no test case.
//
//	go run ./cmd/conformance
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"runtime"
	"strings"
	"sync"

	"google.golang.org/genproto/googleapis/rpc/code"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// request is one line of input. The op decides which fields it has.
type request struct {
	ID json.RawMessage `json:"id"`
	Op string          `json:"op"`

	Server  string `json:"server"`
	Address string `json:"address"`

	TLS       *kvgrpc.TLSFiles `json:"tls"`
	Token     string           `json:"token"`
	TokenFile string           `json:"tokenFile"`

	Method    string            `json:"method"`
	Request   json.RawMessage   `json:"request"`
	DeadlineS float64           `json:"deadlineS"`
	Metadata  map[string]string `json:"metadata"`

	Stream   string          `json:"stream"`
	TimeoutS float64         `json:"timeoutS"`
	Filter   json.RawMessage `json:"filter"`
	After    *point          `json:"after"`

	TransferID string `json:"transferId"`
	Until      string `json:"until"`

	Keeper string            `json:"keeper"`
	Leases []json.RawMessage `json:"leases"`
	TTLS   float64           `json:"ttlS"`
	Index  int               `json:"index"`

	To        string `json:"to"`
	RequestID string `json:"requestId"`

	Sides   []side `json:"sides"`
	Message string `json:"message"`
}

// point is a point in the changes of an engine. Its numbers of 64 bits come as text or as numbers.
type point struct {
	EventSeq    uint64text `json:"eventSeq"`
	Incarnation uint64text `json:"incarnation"`
}

type side struct {
	Server            string   `json:"server"`
	TransferKey       []byte   `json:"transferKey"`
	TransferID        string   `json:"transferId"`
	FreeAllocationIDs []string `json:"freeAllocationIds"`
}

// uint64text is a number in Protobuf's JSON mapping.
type uint64text uint64

func (u *uint64text) UnmarshalJSON(data []byte) error {
	return json.Unmarshal([]byte(strings.Trim(string(data), `"`)), (*uint64)(u))
}

type answer map[string]any

// executor holds the objects that requests name.
type executor struct {
	mu      sync.Mutex
	clients map[string]*kvgrpc.Client
	streams map[string]*stream
	keepers map[string]*keeper
}

func newExecutor() *executor {
	return &executor{
		clients: map[string]*kvgrpc.Client{},
		streams: map[string]*stream{},
		keepers: map[string]*keeper{},
	}
}

func main() {
	log.SetFlags(0)
	if err := newExecutor().serve(os.Stdin, os.Stdout); err != nil {
		log.Fatal("conformance: ", err)
	}
}

// serve answers each request in its own goroutine, so that a waiting request delays no other. The end of the input ends
// all of them.
func (e *executor) serve(in io.Reader, out io.Writer) error {
	var mu sync.Mutex
	answers := json.NewEncoder(out)
	write := func(id json.RawMessage, key string, value any) {
		mu.Lock()
		defer mu.Unlock()
		if err := answers.Encode(answer{"id": id, key: value}); err != nil {
			log.Fatal("conformance: ", err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 1 {
			var asked request
			if err := json.Unmarshal(line, &asked); err != nil {
				write(asked.ID, "error", answer{"code": "EXECUTOR", "message": err.Error()})
				continue
			}
			all.Go(func() {
				if done, err := e.do(ctx, &asked); err != nil {
					write(asked.ID, "error", describe(err))
				} else {
					write(asked.ID, "ok", done)
				}
			})
		}
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func (e *executor) do(ctx context.Context, r *request) (answer, error) {
	switch r.Op {
	case "hello":
		return answer{"language": "go", "version": strings.TrimPrefix(runtime.Version(), "go")}, nil
	case "connect":
		client, err := kvgrpc.Connect(r.Address, kvgrpc.Options{TLS: r.TLS, Token: r.Token, TokenFile: r.TokenFile})
		if err != nil {
			return nil, err
		}
		put(e, e.clients, r.Server, client)
		return answer{}, nil
	case "call":
		return e.call(ctx, r)
	case "open":
		return e.open(ctx, r)
	case "send", "finish", "next", "cancel":
		return e.onStream(ctx, r)
	case "wait":
		return e.wait(ctx, r)
	case "pull":
		return e.pull(ctx, r)
	case "move":
		return e.move(ctx, r)
	case "redacted":
		return redacted(r)
	case "watch":
		return e.watch(ctx, r)
	case "watchEngine":
		return e.watchEngine(ctx, r)
	case "keepAlive":
		return e.keepAlive(ctx, r)
	case "kept":
		return e.kept(ctx, r)
	case "stopKeeping":
		keeper, err := named(e, e.keepers, "keeper", r.Keeper)
		if err != nil {
			return nil, err
		}
		keeper.Close()
		return answer{}, nil
	case "cleanUp":
		return e.cleanUp(ctx, r)
	case "close":
		client, err := e.client(r)
		if err != nil {
			return nil, err
		}
		return answer{}, client.Close()
	default:
		return nil, fmt.Errorf("no such op: %q", r.Op)
	}
}

func (e *executor) client(r *request) (*kvgrpc.Client, error) {
	return named(e, e.clients, "server", r.Server)
}

func put[T any](e *executor, table map[string]T, name string, value T) {
	e.mu.Lock()
	defer e.mu.Unlock()
	table[name] = value
}

func named[T any](e *executor, table map[string]T, what, name string) (T, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	value, ok := table[name]
	if !ok {
		return value, fmt.Errorf("no such %s: %q", what, name)
	}
	return value, nil
}

// describe returns what the client's typed error holds. Any other error is the executor's own.
func describe(err error) answer {
	var failed *kvgrpc.Error
	if !errors.As(err, &failed) {
		return answer{"code": "EXECUTOR", "message": err.Error()}
	}
	next := "" // where no kvgrpc server stated it
	if step := failed.NextStep(); step != pb.NextStep_NEXT_STEP_UNSPECIFIED {
		next = strings.TrimPrefix(step.String(), "NEXT_STEP_")
	}
	told := answer{
		"code": code.Code(failed.Code).String(), "reason": failed.Reason, "message": failed.Message, "next": next,
		"engineId": failed.EngineID, "incarnation": fmt.Sprint(failed.Incarnation), "metadata": failed.Metadata,
	}
	if failed.Metadata == nil {
		told["metadata"] = answer{}
	}
	violations := []answer{}
	for _, violation := range failed.Violations {
		violations = append(violations, answer{"field": violation.Field, "description": violation.Description})
	}
	told["violations"] = violations
	if failed.RetryDelay != nil {
		told["retryDelayS"] = failed.RetryDelay.Seconds()
	}
	return told
}
