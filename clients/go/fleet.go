package kvgrpc

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

const (
	// fleetPage is the number of entries that a page of a listing asks for, the most that a server gives.
	fleetPage = 1000
	// fleetRounds is how often a call tries all servers of a fleet.
	fleetRounds = 4
)

// Fleet asks the servers of FleetService which engines there are, and which two fit a request. It is safe for
// concurrent use. Its servers answer for one registry: calls and watches stay at one of them until it fails, and then
// go to the next one.
type Fleet struct {
	clients []*Client
	timeout time.Duration
	// current counts the moves from server to server. All calls share it, so that one of them finds a dead server.
	current atomic.Uint64
}

// ConnectFleet returns a client of the servers of FleetService at these addresses, each `host:port`. It sends nothing
// before the first call. The options are those of the connections to these servers, not to engines.
func ConnectFleet(options Options, addresses ...string) (*Fleet, error) {
	if len(addresses) == 0 {
		return nil, errors.New("kvgrpc: a fleet needs the address of a server")
	}
	// A call that fails goes to the next server, so gRPC does not repeat it at the same one.
	options.DialOptions = append(options.DialOptions[:len(options.DialOptions):len(options.DialOptions)],
		grpc.WithDisableRetry())
	made := &Fleet{}
	for _, address := range addresses {
		client, err := Connect(address, options)
		if err != nil {
			made.Close()
			return nil, err
		}
		made.clients, made.timeout = append(made.clients, client), client.timeout
	}
	return made, nil
}

// Close ends the calls and the watches.
func (f *Fleet) Close() error {
	var failed error
	for _, client := range f.clients {
		failed = errors.Join(failed, client.Close())
	}
	return failed
}

// ListEngines returns all entries that meet the filter, in the order in which the server first saw them. All pages come
// from one server. A nil filter has no conditions.
func (f *Fleet) ListEngines(ctx context.Context, filter *pb.EngineFilter) ([]*pb.FleetEngine, error) {
	var engines []*pb.FleetEngine
	err := f.ask(ctx, func(ctx context.Context, client *Client) error {
		request := &pb.ListEnginesRequest{Filter: filter, PageSize: fleetPage}
		engines = nil
		for {
			page, err := client.Fleet.ListEngines(ctx, request)
			if err != nil {
				return err
			}
			engines = append(engines, page.Engines...)
			if page.NextPageToken == "" {
				return nil
			}
			request.PageToken = page.NextPageToken
		}
	})
	return engines, err
}

// PickPair returns a prefill and a decode engine for a request, and why these. Both are nil if no pair fits; the reply
// then says what was in the way. Name the engines that have failed the request in ExcludedEngineIds. A Chain makes
// engines preferred that hold the beginning of the prompt.
func (f *Fleet) PickPair(ctx context.Context, request *pb.PickPairRequest) (*pb.PickPairResponse, error) {
	var reply *pb.PickPairResponse
	err := f.ask(ctx, func(ctx context.Context, client *Client) (err error) {
		reply, err = client.Fleet.PickPair(ctx, request)
		return err
	})
	return reply, err
}

// ask makes a call at the servers in turn, until one answers. Each server has its share of the time that is left.
func (f *Fleet) ask(ctx context.Context, call func(context.Context, *Client) error) error {
	if _, stated := ctx.Deadline(); !stated {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.timeout)
		defer cancel()
	}
	deadline, _ := ctx.Deadline()
	var pauses pauses
	for round := 1; ; round++ {
		var err error
		hopeless := true // no server can ever answer
		for left := len(f.clients); left > 0; left-- {
			at, client := f.server()
			share, cancel := context.WithTimeout(ctx, time.Until(deadline)/time.Duration(left))
			err = call(share, client)
			cancel()
			if err == nil || ctx.Err() != nil || !elsewhere(err) {
				return err
			}
			hopeless = hopeless && unimplemented(err)
			f.leave(at)
		}
		if hopeless || round == fleetRounds || pauses.take(ctx, retryDelay(err)) != nil {
			return err
		}
	}
}

// server returns the server that calls go to now, and the number of moves until now.
func (f *Fleet) server() (at uint64, client *Client) {
	at = f.current.Load()
	return at, f.clients[at%uint64(len(f.clients))]
}

// leave moves to the next server, unless another call has moved already.
func (f *Fleet) leave(at uint64) { f.current.CompareAndSwap(at, at+1) }

// elsewhere reports whether another server, or the same one later, may answer a call that has failed.
func elsewhere(err error) bool {
	var failed *Error
	if brokenOrFull(err) || unimplemented(err) {
		return true
	}
	// A listing whose server has restarted begins anew.
	return errors.As(err, &failed) && failed.Reason == "INCARNATION_CHANGED"
}

// unimplemented reports whether the server has no registry, or is too old.
func unimplemented(err error) bool {
	var failed *Error
	return errors.As(err, &failed) && failed.Code == codes.Unimplemented
}
