package kvgrpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sync"

	"google.golang.org/grpc/attributes"
	"google.golang.org/grpc/resolver"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// Scheme is the scheme of targets that name a model: `kvgrpc:///MODEL`.
const Scheme = "kvgrpc"

// NewResolver returns a resolver for targets `kvgrpc://SERVER/MODEL?role=ROLE`, as [Connect] and grpc.NewClient take
// them:
//
//	decoders, err := kvgrpc.Connect("kvgrpc:///llama?role=decode", kvgrpc.Options{
//		DialOptions: []grpc.DialOption{grpc.WithResolvers(kvgrpc.NewResolver(kvgrpc.Options{}, "fleet:50050"))},
//	})
//
// The engines of the model that play the role become the endpoints of the channel, as a server of the fleet tells them.
// Calls go to a usable engine with little load: of two by chance, the one with the lower load. An engine that drains,
// fails or goes gets no call from then on. While no server of the fleet answers, calls go to the last known engines.
// [WithEngine] directs a call to one engine, which may also drain.
//
// SERVER is a server of the fleet, `host:port`. The query's `server` names another one, any number of times. The
// servers given here are those of targets that name none. ROLE is prefill, decode or both; without it, each engine
// fits. Without MODEL, each model fits. The options are those of the connections to the fleet's servers; connections
// to engines have the channel's. With TLS an engine must have a certificate for its address.
//
// A call that is repeated after UNAVAILABLE may reach another engine. What the first one did for it ends with its TTL.
func NewResolver(options Options, servers ...string) resolver.Builder {
	return &fleetBuilder{options, servers}
}

type fleetBuilder struct {
	options Options
	servers []string
}

// Scheme returns the scheme of the targets.
func (b *fleetBuilder) Scheme() string { return Scheme }

// Build begins to watch the fleet of a target.
func (b *fleetBuilder) Build(
	target resolver.Target, channel resolver.ClientConn, _ resolver.BuildOptions,
) (resolver.Resolver, error) {
	servers, filter, err := fleetTarget(target)
	if err != nil {
		return nil, err
	}
	if len(servers) == 0 {
		servers = b.servers
	}
	config, err := fleetServiceConfig()
	if err != nil {
		return nil, err
	}
	fleet, err := ConnectFleet(b.options, servers...)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	made := &fleetResolver{fleet: fleet, cancel: cancel}
	made.watching.Go(func() {
		for engines := range fleet.WatchEngines(ctx, filter) {
			if engines.Stale != nil {
				if len(engines.Usable) == 0 {
					channel.ReportError(engines.Stale)
				}
				continue
			}
			// An error says that no engine is there. The next change comes by itself.
			_ = channel.UpdateState(resolver.State{
				Endpoints: endpoints(engines), ServiceConfig: channel.ParseServiceConfig(config),
			})
		}
	})
	return made, nil
}

// fleetTarget returns the servers that a target names, and the filter of its engines.
func fleetTarget(target resolver.Target) ([]string, *pb.EngineFilter, error) {
	query, err := url.ParseQuery(target.URL.RawQuery)
	if err != nil {
		return nil, nil, fmt.Errorf("kvgrpc: the target's query: %w", err)
	}
	filter := &pb.EngineFilter{ModelName: target.Endpoint()}
	var servers []string
	if target.URL.Host != "" {
		servers = append(servers, target.URL.Host)
	}
	for name, values := range query {
		switch name {
		case "server":
			servers = append(servers, values...)
		case "role":
			role, known := map[string]pb.EngineRole{
				"prefill": pb.EngineRole_ENGINE_ROLE_PREFILL,
				"decode":  pb.EngineRole_ENGINE_ROLE_DECODE,
				"both":    pb.EngineRole_ENGINE_ROLE_BOTH,
			}[values[0]]
			if !known || len(values) > 1 {
				return nil, nil, errors.New("kvgrpc: the target's role is prefill, decode or both")
			}
			filter.Role = role
		default:
			return nil, nil, fmt.Errorf("kvgrpc: the target's query has role and server, not %q", name)
		}
	}
	return servers, filter, nil
}

// fleetServiceConfig returns ServiceConfig with the balancer of a fleet.
func fleetServiceConfig() (string, error) {
	var config map[string]any
	if err := json.Unmarshal([]byte(ServiceConfig), &config); err != nil {
		return "", err
	}
	config["loadBalancingConfig"] = []any{map[string]any{fleetPolicy: struct{}{}}}
	text, err := json.Marshal(config)
	return string(text), err
}

type fleetResolver struct {
	fleet    *Fleet
	cancel   context.CancelFunc
	watching sync.WaitGroup
}

// ResolveNow does nothing, because changes come by themselves.
func (r *fleetResolver) ResolveNow(resolver.ResolveNowOptions) {}

// Close ends the watch.
func (r *fleetResolver) Close() {
	r.cancel()
	r.watching.Wait()
	r.fleet.Close()
}

// endpoints returns the engines that may get calls: usable ones, and draining ones for what they have begun.
func endpoints(engines FleetEngines) []resolver.Endpoint {
	seen := resolver.NewEndpointMap[bool]()
	var made []resolver.Endpoint
	add := func(engine *pb.FleetEngine, usable bool) {
		endpoint := resolver.Endpoint{Attributes: attributes.New(fleetMemberKey{}, fleetMember{engine, usable})}
		for _, address := range engine.Addresses {
			// The server's name is that of the address, because the target names a model and no host.
			endpoint.Addresses = append(endpoint.Addresses, resolver.Address{Addr: address, ServerName: address})
		}
		// One process answers at one address. A draining life gives way to a usable one there.
		if _, there := seen.Get(endpoint); !there && len(endpoint.Addresses) > 0 {
			seen.Set(endpoint, true)
			made = append(made, endpoint)
		}
	}
	for _, engine := range engines.Usable {
		add(engine, true)
	}
	for _, engine := range engines.Engines {
		if engine.State == pb.EngineState_ENGINE_STATE_DRAINING && !slices.Contains(engines.Usable, engine) {
			add(engine, false)
		}
	}
	return made
}
