package kvgrpc

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// fleetTrust is how long an engine that one server found healthy counts at another one that has not asked it yet. A
// server itself relies as long on an answer.
const fleetTrust = 15 * time.Second

// FleetEngines are all entries that meet a filter, as of one moment. Its slices belong to the caller, the entries are
// shared: do not change them.
type FleetEngines struct {
	// Engines are all entries, ordered by engine id.
	Engines []*pb.FleetEngine
	// Usable are the entries whose engines may get new work. These are the healthy ones. Another server of the fleet has
	// to ask all engines first: until it has asked, and for at most 15 s, an engine stays that was healthy before.
	Usable []*pb.FleetEngine
	// Stale is why no server of the fleet answers now; nil while one does. The entries are then the last known ones. It
	// is told once for each outage, and again when the cause changes.
	Stale error
	// RegistrySilence is the time since the registry broke off; 0 while it answers.
	RegistrySilence time.Duration
}

// WatchEngines yields all entries that meet the filter at once, and all of them again after each change. When a stream
// breaks it goes on at the next server, after the last revision that it has got. When all servers have failed in a row
// it yields the last list as stale, and tries again with pauses of 0.1 s to 2 s. It ends with its context, or with the
// fleet's Close.
//
// A change of an engine's load alone is no change, so loads may be old.
func (f *Fleet) WatchEngines(ctx context.Context, filter *pb.EngineFilter) iter.Seq[FleetEngines] {
	return func(yield func(FleetEngines) bool) {
		ctx, cancel := f.clients[0].bound(ctx)
		defer cancel()
		known := &fleetView{}
		var pauses pauses
		told, failures := codes.OK, 0
		for {
			at, client := f.server()
			opened := time.Now()
			wanted, stood, err := client.watchFleetOnce(ctx, filter, known, yield)
			if !wanted || ctx.Err() != nil {
				return
			}
			if stood {
				told, failures = codes.OK, 0
			}
			f.leave(at)
			pauses.after(time.Since(opened))
			if failures++; failures < len(f.clients) {
				continue
			}
			failures = 0
			if code := status.Code(err); code != told {
				told = code
				if !yield(known.as(err)) {
					return
				}
			}
			if pauses.take(ctx, retryDelay(err)) != nil {
				return
			}
		}
	}
}

// watchFleetOnce reads one stream. It returns whether the caller wants more, and whether there was a complete message.
func (c *Client) watchFleetOnce(
	ctx context.Context, filter *pb.EngineFilter, known *fleetView, yield func(FleetEngines) bool,
) (wanted, stood bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A server repeats itself at least every 5 s, so a silent one is dead.
	var silent atomic.Bool
	watchdog := time.AfterFunc(c.silence, func() {
		silent.Store(true)
		cancel()
	})
	defer watchdog.Stop()
	news := known.begin()
	stream, err := c.Fleet.WatchEngines(ctx, &pb.WatchEnginesRequest{Filter: filter, AfterRevision: known.revision})
	for err == nil {
		var reply *pb.WatchEnginesResponse
		if reply, err = stream.Recv(); err != nil {
			break
		}
		watchdog.Stop() // a slow caller is not a silent server
		news.take(reply)
		if reply.Complete {
			// The first list of a stream also says that the last one is stale no more.
			if changed := known.learn(news, reply, time.Now()); (changed || !stood) && !yield(known.as(nil)) {
				return false, true, nil
			}
			stood = true
		}
		watchdog.Reset(c.silence)
	}
	if silent.Load() {
		err = &Error{Code: codes.Unavailable, Message: fmt.Sprintf("the fleet's server has said nothing for %v", c.silence)}
	} else if err == io.EOF {
		err = &Error{Code: codes.Unavailable, Message: "the fleet's server ended the watch"}
	}
	return true, stood, err
}

// fleetView is what a watch knows of a fleet.
type fleetView struct {
	engines  map[string]*pb.FleetEngine // by entry id
	revision string
	// server is the incarnation of the server that told it last.
	server  uint64
	silence time.Duration
	// trusted are entries that an earlier server found healthy and that this one has not asked yet, with the end of
	// the trust.
	trusted map[string]time.Time
}

// fleetNews are entries of a stream since its last complete message. Until then the view stays as it was.
type fleetNews struct {
	engines map[string]*pb.FleetEngine
	changed bool
}

func (v *fleetView) begin() *fleetNews {
	news := &fleetNews{engines: maps.Clone(v.engines)}
	if news.engines == nil {
		news.engines = map[string]*pb.FleetEngine{}
	}
	return news
}

func (n *fleetNews) take(reply *pb.WatchEnginesResponse) {
	if reply.Snapshot {
		clear(n.engines)
	}
	n.changed = n.changed || reply.Snapshot || len(reply.Engines)+len(reply.RemovedEntryIds) > 0
	for _, engine := range reply.Engines {
		n.engines[engine.EntryId] = engine
	}
	for _, id := range reply.RemovedEntryIds {
		delete(n.engines, id)
	}
}

// learn takes over the news of a complete message. It returns whether they say something new.
func (v *fleetView) learn(news *fleetNews, reply *pb.WatchEnginesResponse, now time.Time) bool {
	before := len(v.trusted)
	if server := reply.GetHeader().GetIncarnation(); server != v.server {
		v.trust(now)
		v.server = server
	}
	silence := reply.RegistrySilence.AsDuration()
	changed := news.changed || (silence > 0) != (v.silence > 0)
	v.engines, v.revision, v.silence = maps.Clone(news.engines), reply.Revision, silence
	news.changed = false
	maps.DeleteFunc(v.trusted, func(id string, end time.Time) bool {
		engine := v.engines[id]
		return engine == nil || !unproven(engine) || now.After(end)
	})
	return changed || len(v.trusted) != before
}

// trust lets all engines count that are healthy so far.
func (v *fleetView) trust(now time.Time) {
	if v.trusted == nil {
		v.trusted = map[string]time.Time{}
	}
	for id, engine := range v.engines {
		if engine.State == pb.EngineState_ENGINE_STATE_HEALTHY {
			v.trusted[id] = now.Add(fleetTrust)
		}
	}
}

// as returns the view for a caller.
func (v *fleetView) as(stale error) FleetEngines {
	engines := slices.SortedFunc(maps.Values(v.engines), func(a, b *pb.FleetEngine) int {
		return cmp.Or(cmp.Compare(a.EngineId, b.EngineId), cmp.Compare(a.EntryId, b.EntryId))
	})
	var usable []*pb.FleetEngine
	for _, engine := range engines {
		_, trusted := v.trusted[engine.EntryId]
		if engine.State == pb.EngineState_ENGINE_STATE_HEALTHY || trusted {
			usable = append(usable, engine)
		}
	}
	return FleetEngines{Engines: engines, Usable: usable, Stale: stale, RegistrySilence: v.silence}
}

// unproven reports whether nothing was found out about an engine.
func unproven(engine *pb.FleetEngine) bool {
	return engine.State == pb.EngineState_ENGINE_STATE_UNPROVEN || engine.State == pb.EngineState_ENGINE_STATE_UNSPECIFIED
}
