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

// Options configures a client. The zero value is usable.
type Options struct {
	// Timeout is the deadline of a unary call whose context has none, retries included. 0 means 10 s. For a call that
	// waits at the server, the wait is added to it.
	Timeout time.Duration
	// Credentials secure the transport. Nil means that the connection is not encrypted.
	Credentials credentials.TransportCredentials
	// TLS names the files of TLS, in place of Credentials. They are read again for each new connection.
	TLS *TLSFiles
	// Token is a bearer token that every call carries.
	Token string
	// TokenFile is the path of a file with the token, in place of Token. The file is read again once a second.
	TokenFile string
	// Metadata is sent with every call.
	Metadata map[string]string
	// Traceparent returns the W3C traceparent of a call from its context, or "" for none. See also [WithTraceparent].
	Traceparent func(context.Context) string
	// DialOptions are applied after the client's own.
	DialOptions []grpc.DialOption
}

// String omits the token and the values of the metadata, because they may be secrets.
func (o Options) String() string {
	return fmt.Sprintf("{Timeout:%v Metadata:%v}", o.Timeout, slices.Sorted(maps.Keys(o.Metadata)))
}

// GoString is String, for the same reason.
func (o Options) GoString() string { return "kvgrpc.Options" + o.String() }

// Client is the client of one server. It is safe for concurrent use. Its fields are the generated stubs.
type Client struct {
	Admin      pb.AdminServiceClient
	Fleet      pb.FleetServiceClient
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
	silence time.Duration // a watch reports an engine unreachable after this time
}

const (
	defaultTimeout = 10 * time.Second
	// A server repeats the state of its engine at least every 5 s, so three messages in a row are missing by then.
	engineSilence = 15 * time.Second
)

// Connect returns a client of the server at address, `host:port`. It sends nothing before the first call.
func Connect(address string, options Options) (*Client, error) {
	if options.Timeout < 0 {
		return nil, errors.New("kvgrpc: the timeout is negative")
	}
	if options.Timeout == 0 {
		options.Timeout = defaultTimeout
	}
	if options.TLS != nil {
		if options.Credentials != nil {
			return nil, errors.New("kvgrpc: files of TLS and credentials are both given")
		}
		made, err := options.TLS.Credentials()
		if err != nil {
			return nil, err
		}
		options.Credentials = made
	}
	if options.Credentials == nil {
		options.Credentials = insecure.NewCredentials()
	}
	token, err := newBearer(options.Token, options.TokenFile)
	if err != nil {
		return nil, err
	}
	calls := calls{options, token}
	own := []grpc.DialOption{
		grpc.WithTransportCredentials(options.Credentials),
		grpc.WithDefaultServiceConfig(ServiceConfig),
		grpc.WithChainUnaryInterceptor(calls.unary),
		grpc.WithChainStreamInterceptor(calls.stream),
		// Keepalive detects a dead connection within 40 s while calls are open.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		// The default pause of gRPC after a refused connection grows to two minutes. A server that restarts is back in
		// seconds.
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
		Fleet:      pb.NewFleetServiceClient(conn),
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

// Conn returns the client's channel, for services that have no stub here (health, reflection) and for dynamic calls.
// These calls get the same deadlines, keys and errors.
func (c *Client) Conn() *grpc.ClientConn { return c.conn }

// Close ends the client's calls, streams and loops. Transfers and leases continue at the server.
func (c *Client) Close() error {
	c.close()
	return c.conn.Close()
}

var errClosed = errors.New("the client is closed")

// bound returns the context of a loop. It ends with ctx or with the client.
func (c *Client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.closed, func() { cancel(errClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
