package kvgrpc

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// Options of a client. The zero value is usable.
type Options struct {
	// Timeout is the deadline of a unary call whose context has none, repetitions included. 0 means 10 s. Calls that wait
	// at the server get their wait on top.
	Timeout time.Duration
	// Credentials of the transport. Nil means that the connection is not encrypted.
	Credentials credentials.TransportCredentials
	// Metadata goes with every call, an `authorization` for example.
	Metadata map[string]string
	// Traceparent returns the W3C traceparent of a call from its context, or nothing. See also [WithTraceparent].
	Traceparent func(context.Context) string
	// DialOptions are applied after the client's own.
	DialOptions []grpc.DialOption
}

// String leaves out the values of the metadata, which may be secrets.
func (o Options) String() string {
	return fmt.Sprintf("{Timeout:%v Metadata:%v}", o.Timeout, slices.Sorted(maps.Keys(o.Metadata)))
}

// Client of one server, safe for concurrent use. Its fields are the generated stubs.
type Client struct {
	Admin      pb.AdminServiceClient
	Handoff    pb.HandoffServiceClient
	Handshake  pb.HandshakeServiceClient
	Leases     pb.LeaseServiceClient
	Pool       pb.PoolServiceClient
	Schedulers pb.SchedulerServiceClient
	Tensors    pb.TensorServiceClient
	Transfers  pb.TransferServiceClient

	conn    *grpc.ClientConn
	closed  context.Context // ends the client's loops
	close   context.CancelFunc
	timeout time.Duration
	silence time.Duration // after which a watch reports an engine unreachable
}

const (
	defaultTimeout = 10 * time.Second
	// A server repeats the state of its engine at least every 5 s: three in a row are missing.
	engineSilence = 15 * time.Second
)

// Connect makes a client of the server at address, `host:port`. Nothing is sent before the first call.
func Connect(address string, options Options) (*Client, error) {
	if options.Timeout < 0 {
		return nil, errors.New("kvgrpc: the timeout is negative")
	}
	if options.Timeout == 0 {
		options.Timeout = defaultTimeout
	}
	if options.Credentials == nil {
		options.Credentials = insecure.NewCredentials()
	}
	calls := calls{options}
	own := []grpc.DialOption{
		grpc.WithTransportCredentials(options.Credentials),
		grpc.WithDefaultServiceConfig(ServiceConfig),
		grpc.WithChainUnaryInterceptor(calls.unary),
		grpc.WithChainStreamInterceptor(calls.stream),
		// A connection whose other end is gone without a word is noticed within 40 s, while calls are open.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		// gRPC's own pause after a refused connection grows to two minutes. A server that restarts is back in seconds.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: pauseMin, Multiplier: 2, Jitter: 0.2, MaxDelay: pauseMax},
			MinConnectTimeout: 5 * time.Second,
		}),
	}
	conn, err := grpc.NewClient(address, append(own, options.DialOptions...)...)
	if err != nil {
		return nil, err
	}
	closed, closing := context.WithCancel(context.Background())
	return &Client{
		Admin:      pb.NewAdminServiceClient(conn),
		Handoff:    pb.NewHandoffServiceClient(conn),
		Handshake:  pb.NewHandshakeServiceClient(conn),
		Leases:     pb.NewLeaseServiceClient(conn),
		Pool:       pb.NewPoolServiceClient(conn),
		Schedulers: pb.NewSchedulerServiceClient(conn),
		Tensors:    pb.NewTensorServiceClient(conn),
		Transfers:  pb.NewTransferServiceClient(conn),
		conn:       conn,
		closed:     closed,
		close:      closing,
		timeout:    options.Timeout,
		silence:    engineSilence,
	}, nil
}

// Conn is the client's channel: for services that have no stub here (health, reflection) and for dynamic calls. They
// get the same deadlines, keys and errors.
func (c *Client) Conn() *grpc.ClientConn { return c.conn }

// Close ends the client's calls, streams and loops. Transfers and leases live on at the server.
func (c *Client) Close() error {
	c.close()
	return c.conn.Close()
}

var errClosed = errors.New("the client is closed")

// bound is the context of a loop, which also ends with the client.
func (c *Client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.closed, func() { cancel(errClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
