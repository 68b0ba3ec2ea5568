package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// role is what an engine does for a request.
type role string

const (
	prefill role = "prefill"
	decode  role = "decode"
)

// address is the address of an engine, as on the command line.
type address struct{ kind, url, lead string }

type addresses []address

func (a *addresses) String() string { return fmt.Sprint(*a) }

func (a *addresses) Set(text string) error {
	parts := strings.Split(text, ",")
	if len(parts) != 3 || (parts[0] != "drive" && parts[0] != "relay") {
		return fmt.Errorf("an engine is KIND,URL,LEAD, KIND drive or relay: %q", text)
	}
	*a = append(*a, address{parts[0], strings.TrimRight(parts[1], "/"), parts[2]})
	return nil
}

// steps are what one engine does for a request. Each kind of engine has its own implementation.
type steps interface {
	// prefill computes the prompt and hands its KV over for a pull.
	prefill(context.Context, *attempt) (*handOver, error)
	// decode pulls what was handed over, and answers.
	decode(context.Context, *attempt, *handOver) error

	// expect prepares a decode engine for a push from source.
	expect(ctx context.Context, a *attempt, source *engine) (*landing, error)
	// push computes the prompt and pushes its KV.
	push(context.Context, *attempt, *engine) error
	// land waits until the push is there, and answers.
	land(context.Context, *attempt, *landing) error

	// alone computes everything at this engine, and answers.
	alone(context.Context, *attempt) error
}

// engine is one LLM instance: its HTTP server, its lead, and its state.
type engine struct {
	address
	steps
	role   role
	client *kvgrpc.Client
	// lifeGrace is the option of the same name.
	lifeGrace time.Duration

	mu sync.Mutex
	// status is the lead's latest status; nil while the lead cannot be reached.
	status      *pb.EngineStatus
	unreachable error
	engineID    string
	life        *life
	// underway are the steps that the engine does for this router now.
	underway int
	// barred means that the fleet lets the engine get no work.
	barred bool
}

func (e *engine) String() string { return string(cmp.Or(e.role, "engine")) + " " + e.lead }

// newEngine connects to an engine's lead. An engine without a role does both parts.
func newEngine(at address, role role, o options) (*engine, error) {
	client, err := kvgrpc.Connect(at.lead, o.calls())
	if err != nil {
		return nil, err
	}
	e := &engine{address: at, role: role, client: client, lifeGrace: o.lifeGrace}
	if at.kind == "drive" {
		e.steps = &driven{engine: e}
	} else {
		e.steps = &relayed{e}
	}
	return e, nil
}

// plays reports whether the engine does a part of requests.
func (e *engine) plays(role role) bool { return e.role == role || e.role == "" }

// fleet is the set of all engines, each watched.
type fleet struct {
	stop  context.CancelFunc
	loops sync.WaitGroup
	// asked tells which engines there are; nil where the command line names them.
	asked *kvgrpc.Fleet
	model string

	mu sync.Mutex
	// engines is replaced as a whole.
	engines []*engine
	members map[string]*member // by entry id
}

// all returns all engines.
func (f *fleet) all() []*engine {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.engines
}

// join connects to the leads of all engines and begins to watch them.
func join(o options) (*fleet, error) {
	watching, stop := context.WithCancel(context.Background())
	f := &fleet{stop: stop, model: o.model, members: map[string]*member{}}
	if o.fleet != "" {
		asked, err := kvgrpc.ConnectFleet(o.calls(), strings.Split(o.fleet, ",")...)
		if err != nil {
			stop()
			return nil, err
		}
		f.asked = asked
		f.loops.Go(func() { f.follow(watching, o) })
	}
	for _, group := range []struct {
		role  role
		named addresses
	}{{prefill, o.prefill}, {decode, o.decode}} {
		for _, address := range group.named {
			e, err := newEngine(address, group.role, o)
			if err != nil {
				f.leave()
				return nil, err
			}
			f.engines = append(f.engines, e)
			f.loops.Go(func() { e.watch(watching) })
		}
	}
	return f, nil
}

// leave ends the watches and the connections.
func (f *fleet) leave() {
	f.stop()
	f.loops.Wait()
	for _, e := range f.all() {
		e.client.Close()
	}
	if f.asked != nil {
		f.asked.Close()
	}
}

// watch keeps the engine's status up to date.
func (e *engine) watch(ctx context.Context) {
	for update := range e.client.WatchEngine(ctx, 0) {
		e.learn(update)
	}
}

func (e *engine) learn(update kvgrpc.EngineUpdate) {
	e.mu.Lock()
	defer e.mu.Unlock()
	before, admission := e.status != nil, e.status.GetAdmission()
	e.unreachable, e.status = update.Unreachable, update.Response.GetStatus()
	if update.Unreachable != nil {
		slog.Warn("an engine cannot be reached", "engine", e.String(), "error", update.Unreachable)
		e.life.doubt(e.lifeGrace)
		return
	}
	e.engineID = update.Response.GetHeader().GetEngineId()
	e.life = e.life.confirm(update.Response.GetHeader().GetIncarnation())
	if !before || admission != e.status.Admission {
		slog.Info("an engine", "engine", e.String(), "id", e.engineID, "admission", e.status.Admission.String(),
			"reason", e.status.AdmissionReason)
	}
}

// begin counts a step of the engine. The returned function ends the step.
func (e *engine) begin() (end func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.underway++
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.underway--
	}
}
