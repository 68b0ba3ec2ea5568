package kvgrpc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/endpointsharding"
	"google.golang.org/grpc/balancer/pickfirst"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

const (
	// fleetPolicy is the name of the balancer in gRPC's registry.
	fleetPolicy = "kvgrpc_fleet"
	// engineIDKey is the metadata that names the engine of a call.
	engineIDKey = "kvgrpc-engine-id"
	// callLoad is the load of one call that is under way. A server counts a waiting transfer as much.
	callLoad = 1.0 / 16
)

var errNoEngine = errors.New("kvgrpc: no engine of the fleet takes work")

func init() { balancer.Register(fleetPolicyBuilder{}) }

// WithEngine directs all calls with this context to one engine, on a channel whose target names a model. The engine may
// drain, so that calls for what it has begun still reach it. A call for an engine that is neither healthy nor draining
// fails with UNAVAILABLE.
func WithEngine(ctx context.Context, engineID string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, engineIDKey, engineID)
}

// fleetMember is the engine of an endpoint.
type fleetMember struct {
	engine *pb.FleetEngine
	usable bool
}

type fleetMemberKey struct{}

type fleetPolicyBuilder struct{}

// Name returns the name of the policy.
func (fleetPolicyBuilder) Name() string { return fleetPolicy }

// Build returns a balancer with a child for each engine. A child connects to the engine's best address.
func (fleetPolicyBuilder) Build(channel balancer.ClientConn, options balancer.BuildOptions) balancer.Balancer {
	made := &fleetBalancer{ClientConn: channel, underway: map[string]*atomic.Int64{}}
	made.Balancer = endpointsharding.NewBalancer(
		made, options, balancer.Get(pickfirst.Name).Build, endpointsharding.Options{})
	return made
}

// fleetBalancer stands between the channel and the children, and replaces the choice among them.
type fleetBalancer struct {
	balancer.ClientConn
	balancer.Balancer

	mu       sync.Mutex
	underway map[string]*atomic.Int64 // calls, by entry id
	// why is why the fleet cannot be asked; nil while it can.
	why error
}

// UpdateClientConnState takes the engines. It leaves out the policy's own configuration, which is not the children's.
func (b *fleetBalancer) UpdateClientConnState(state balancer.ClientConnState) error {
	b.fails(nil)
	return b.Balancer.UpdateClientConnState(balancer.ClientConnState{ResolverState: state.ResolverState})
}

// ResolverError takes the reason why the fleet cannot be asked.
func (b *fleetBalancer) ResolverError(err error) {
	b.fails(err)
	b.Balancer.ResolverError(err)
}

func (b *fleetBalancer) fails(why error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.why = why
}

// UpdateState takes the state of all children, and gives the channel its choice among them.
func (b *fleetBalancer) UpdateState(state balancer.State) {
	b.mu.Lock()
	defer b.mu.Unlock()
	choice := &fleetPicker{named: map[string]*fleetChild{}, why: b.why}
	underway := map[string]*atomic.Int64{}
	for _, child := range endpointsharding.ChildStatesFromPicker(state.Picker) {
		member, ok := child.Endpoint.Attributes.Value(fleetMemberKey{}).(fleetMember)
		if !ok || child.State.Picker == nil {
			continue // the child has not begun
		}
		id := member.engine.EntryId
		if underway[id] = b.underway[id]; underway[id] == nil {
			underway[id] = new(atomic.Int64)
		}
		made := &fleetChild{child.State.Picker, member.engine.Load, underway[id]}
		if choice.named[member.engine.EngineId] == nil || member.usable {
			choice.named[member.engine.EngineId] = made
		}
		switch child.State.ConnectivityState {
		case connectivity.Ready:
			if member.usable {
				choice.ready = append(choice.ready, made)
			}
		case connectivity.TransientFailure:
			if member.usable {
				choice.failed = append(choice.failed, made)
			}
		default:
			choice.connecting = choice.connecting || member.usable
		}
	}
	b.underway = underway
	state.Picker = choice
	b.ClientConn.UpdateState(state)
}

// fleetChild is one engine in a choice.
type fleetChild struct {
	picker   balancer.Picker // of the engine's connection
	load     float64         // told by the fleet
	underway *atomic.Int64
}

// cost is the load of the engine with the calls of this channel, of which the fleet may not know yet.
func (c *fleetChild) cost() float64 { return c.load + callLoad*float64(c.underway.Load()) }

// pick takes the engine's connection, and counts the call until its end.
func (c *fleetChild) pick(call balancer.PickInfo) (balancer.PickResult, error) {
	picked, err := c.picker.Pick(call)
	if err != nil {
		return picked, err
	}
	c.underway.Add(1)
	done := picked.Done
	picked.Done = func(info balancer.DoneInfo) {
		c.underway.Add(-1)
		if done != nil {
			done(info)
		}
	}
	return picked, nil
}

// fleetPicker chooses the engine of each call. It is made anew with each change.
type fleetPicker struct {
	named         map[string]*fleetChild // by engine id, also draining ones
	ready, failed []*fleetChild          // usable ones by the state of their connections
	connecting    bool                   // another usable one may become ready
	why           error
}

// Pick returns the connection of the engine that the call names, or of the less loaded one of two by chance.
func (p *fleetPicker) Pick(call balancer.PickInfo) (balancer.PickResult, error) {
	if stated, _ := metadata.FromOutgoingContext(call.Ctx); len(stated.Get(engineIDKey)) > 0 {
		id := stated.Get(engineIDKey)[0]
		if child := p.named[id]; child != nil {
			return child.pick(call)
		}
		return balancer.PickResult{}, fmt.Errorf("kvgrpc: engine %q is neither healthy nor draining", id)
	}
	switch {
	case len(p.ready) > 0:
		return lessLoaded(p.ready).pick(call)
	case p.connecting:
		return balancer.PickResult{}, balancer.ErrNoSubConnAvailable
	case len(p.failed) > 0:
		return lessLoaded(p.failed).pick(call) // the error of its connection
	case p.why != nil:
		return balancer.PickResult{}, p.why
	default:
		return balancer.PickResult{}, errNoEngine
	}
}

// lessLoaded returns the less loaded one of two by chance. The least loaded one of all would get the calls of all
// clients at once.
func lessLoaded(among []*fleetChild) *fleetChild {
	one := rand.IntN(len(among))
	if len(among) == 1 {
		return among[one]
	}
	other := rand.IntN(len(among) - 1)
	if other >= one {
		other++
	}
	if among[other].cost() < among[one].cost() {
		return among[other]
	}
	return among[one]
}
