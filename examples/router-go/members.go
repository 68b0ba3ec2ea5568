package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// pickTime limits how long a request waits for the fleet's choice. After that the router chooses by itself.
const pickTime = time.Second

// picks is how many pairs are picked for one step, while the router knows that an engine of a pair takes no work.
const picks = 3

// rule says where engines have their HTTP servers. The registry has only the addresses of leads.
type rule struct{ engineID, kind, url string }

type rules []rule

func (r *rules) String() string { return fmt.Sprint(*r) }

func (r *rules) Set(text string) error {
	head, url, there := strings.Cut(text, ",")
	id, kind, named := strings.Cut(head, "=")
	if !named {
		id, kind = "", head
	}
	if !there || named && id == "" || (kind != "drive" && kind != "relay") {
		return fmt.Errorf("a rule is KIND,URL or ID=KIND,URL, KIND drive or relay: %q", text)
	}
	*r = append(*r, rule{id, kind, strings.TrimRight(url, "/")})
	return nil
}

// address returns the address of an engine, by the rule for its id or else by the one for all. `{host}` in a URL is the
// host of the engine's lead.
func (r rules) address(engine *pb.FleetEngine) (address, error) {
	if len(engine.Addresses) == 0 {
		return address{}, errors.New("its entry has no address")
	}
	lead := engine.Addresses[0]
	host, _, err := net.SplitHostPort(lead)
	if err != nil {
		return address{}, err
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	for _, id := range []string{engine.EngineId, ""} {
		for _, rule := range r {
			if rule.engineID == id {
				return address{rule.kind, strings.ReplaceAll(rule.url, "{host}", host), lead}, nil
			}
		}
	}
	return address{}, errors.New("no -http says where its HTTP server is")
}

// member is an engine of the registry.
type member struct {
	*engine
	entry *pb.FleetEngine
	stop  context.CancelFunc
	// leaving closes the engine's connection once no request can need it; nil while the registry has the engine.
	leaving *time.Timer
}

// follow takes over each list of the fleet, until the context ends.
func (f *fleet) follow(ctx context.Context, o options) {
	for list := range f.asked.WatchEngines(ctx, &pb.EngineFilter{ModelName: o.model}) {
		if list.Stale != nil {
			slog.Warn("no server of the fleet answers; its last list counts", "error", list.Stale)
			continue
		}
		f.take(ctx, o, list)
	}
}

// take adds engines that are new, and lets none get work that is not usable any more.
func (f *fleet) take(ctx context.Context, o options, list kvgrpc.FleetEngines) {
	f.mu.Lock()
	defer f.mu.Unlock()
	usable, listed := map[string]bool{}, map[string]bool{}
	for _, entry := range list.Usable {
		usable[entry.EntryId] = true
		f.meet(ctx, o, entry)
	}
	for _, entry := range list.Engines {
		listed[entry.EntryId] = true
	}
	for id, m := range f.members {
		m.allow(usable[id])
		if listed[id] || m.leaving != nil {
			continue
		}
		// Requests may still be under way there, and their clean-ups.
		m.leaving = time.AfterFunc(o.timeout+cutGrace, func() { f.part(id, m) })
	}
	f.list()
}

// meet adds the engine of an entry, or takes it back.
func (f *fleet) meet(ctx context.Context, o options, entry *pb.FleetEngine) {
	if m := f.members[entry.EntryId]; m != nil && (m.leaving == nil || m.leaving.Stop()) {
		m.leaving, m.entry = nil, entry
		return
	}
	at, err := o.http.address(entry)
	if err != nil {
		slog.Warn("an engine is not used", "id", entry.EngineId, "error", err)
		return
	}
	roles := map[pb.EngineRole]role{
		pb.EngineRole_ENGINE_ROLE_PREFILL: prefill, pb.EngineRole_ENGINE_ROLE_DECODE: decode,
	}
	e, err := newEngine(at, roles[entry.Role], o)
	if err != nil {
		slog.Warn("an engine is not used", "id", entry.EngineId, "error", err)
		return
	}
	watching, stop := context.WithCancel(ctx)
	f.members[entry.EntryId] = &member{engine: e, entry: entry, stop: stop}
	f.loops.Go(func() { e.watch(watching) })
}

// part forgets an engine that has left the registry.
func (f *fleet) part(id string, m *member) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.members[id] == m {
		delete(f.members, id)
		f.list()
	}
	m.stop()
	m.client.Close()
}

// list makes the list of engines that choices are made from.
func (f *fleet) list() {
	made := make([]*engine, 0, len(f.members))
	for _, m := range f.members {
		made = append(made, m.engine)
	}
	f.engines = made
}

// next returns the engine for a step of a request, or nil where none takes work. With a fleet that is an engine of the
// pair that the fleet picks. While the fleet cannot be asked, the router chooses among the engines that it knows.
func (f *fleet) next(ctx context.Context, request *request, role role) *engine {
	if f.asked == nil {
		return f.choose(role, request.avoid)
	}
	if e := request.pair[role]; e != nil && !request.avoid[e] && e.takesWork() {
		return e
	}
	avoid := map[*engine]bool{}
	for e := range request.avoid {
		avoid[e] = true
	}
	// An engine that takes over has the layout of the one that the request has been to.
	other := prefill
	if role == prefill {
		other = decode
	}
	beside := f.entryOf(request.pair[other])
	for range picks {
		pair, err := f.pick(ctx, beside, avoid)
		if err != nil {
			slog.Warn("the router chooses by itself", "request", request.id, "error", err)
			break
		}
		e := pair[role]
		if e != nil && e.takesWork() {
			if beside == nil {
				request.pair = pair
			}
			request.pair[role] = e
			return e
		}
		if e == nil {
			break // none fits, or the router has not met the engine yet
		}
		avoid[e] = true
	}
	for e := range f.unlike(beside) {
		avoid[e] = true
	}
	if beside != nil {
		avoid[request.pair[other]] = true // an engine that does both parts does not do both of one request
	}
	e := f.choose(role, avoid)
	if e != nil {
		request.pair[role] = e
	}
	return e
}

// pick asks the fleet for two engines.
func (f *fleet) pick(ctx context.Context, beside *pb.FleetEngine, avoid map[*engine]bool) (map[role]*engine, error) {
	ctx, cancel := context.WithTimeout(ctx, pickTime)
	defer cancel()
	asks := &pb.PickPairRequest{
		ModelName: f.model, ModelDigest: beside.GetModelDigest(), LayoutDigest: beside.GetLayoutDigest(),
	}
	for e := range avoid {
		// A server takes 64 at most. A request that so many engines have failed gets what comes.
		if entry := f.entryOf(e); entry != nil && len(asks.ExcludedEngineIds) < 64 {
			asks.ExcludedEngineIds = append(asks.ExcludedEngineIds, entry.EngineId)
		}
	}
	found, err := f.asked.PickPair(ctx, asks)
	if err != nil {
		return nil, err
	}
	return map[role]*engine{
		prefill: f.engineOf(found.GetPrefill().GetEngine()), decode: f.engineOf(found.GetDecode().GetEngine()),
	}, nil
}

func (f *fleet) engineOf(entry *pb.FleetEngine) *engine {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m := f.members[entry.GetEntryId()]; m != nil {
		return m.engine
	}
	return nil
}

func (f *fleet) entryOf(e *engine) *pb.FleetEngine {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		if m.engine == e {
			return m.entry
		}
	}
	return nil
}

// unlike returns the engines that cannot exchange KV with the engine of an entry.
func (f *fleet) unlike(beside *pb.FleetEngine) map[*engine]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	found := map[*engine]bool{}
	for _, m := range f.members {
		if beside != nil &&
			(m.entry.ModelDigest != beside.ModelDigest || m.entry.LayoutDigest != beside.LayoutDigest) {
			found[m.engine] = true
		}
	}
	return found
}

// allow records whether the fleet lets the engine get work.
func (e *engine) allow(usable bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.barred = !usable
}
