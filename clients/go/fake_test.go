package kvgrpc

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// soon is how long a test waits for what must come. Only a test that fails waits so long.
const soon = 20 * time.Second

// These are the services of a server in the test's own process. Each test sets the methods that it needs.
type (
	transfers struct {
		pb.UnimplementedTransferServiceServer
		get    func(context.Context, *pb.GetTransferRequest) (*pb.GetTransferResponse, error)
		wait   func(context.Context, *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error)
		watch  func(*pb.WatchTransfersRequest, grpc.ServerStreamingServer[pb.WatchTransfersResponse]) error
		cancel func(context.Context, *pb.CancelTransferRequest) (*pb.CancelTransferResponse, error)
	}
	pool struct {
		pb.UnimplementedPoolServiceServer
		allocate func(context.Context, *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error)
	}
	handshakes struct {
		pb.UnimplementedHandshakeServiceServer
		connect func(context.Context, *pb.ConnectPeerRequest) (*pb.ConnectPeerResponse, error)
		watch   func(*pb.WatchEngineRequest, grpc.ServerStreamingServer[pb.WatchEngineResponse]) error
	}
	leases struct {
		pb.UnimplementedLeaseServiceServer
		keep func(grpc.BidiStreamingServer[pb.KeepAliveRequest, pb.KeepAliveResponse]) error
	}
	schedulers struct {
		pb.UnimplementedSchedulerServiceServer
		schedule func(grpc.BidiStreamingServer[pb.ScheduleRequest, pb.ScheduleResponse]) error
		poll     func(context.Context, *pb.PollSchedulerNewsRequest) (*pb.PollSchedulerNewsResponse, error)
	}
)

func (s *transfers) GetTransfer(ctx context.Context, r *pb.GetTransferRequest) (*pb.GetTransferResponse, error) {
	return s.get(ctx, r)
}

func (s *transfers) WaitTransfer(ctx context.Context, r *pb.WaitTransferRequest) (*pb.WaitTransferResponse, error) {
	return s.wait(ctx, r)
}

func (s *transfers) WatchTransfers(
	r *pb.WatchTransfersRequest, stream grpc.ServerStreamingServer[pb.WatchTransfersResponse],
) error {
	return s.watch(r, stream)
}

func (s *transfers) CancelTransfer(ctx context.Context, r *pb.CancelTransferRequest) (*pb.CancelTransferResponse, error) {
	return s.cancel(ctx, r)
}

func (s *pool) AllocateBlocks(ctx context.Context, r *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
	return s.allocate(ctx, r)
}

func (s *handshakes) ConnectPeer(ctx context.Context, r *pb.ConnectPeerRequest) (*pb.ConnectPeerResponse, error) {
	return s.connect(ctx, r)
}

func (s *handshakes) WatchEngine(
	r *pb.WatchEngineRequest, stream grpc.ServerStreamingServer[pb.WatchEngineResponse],
) error {
	return s.watch(r, stream)
}

func (s *leases) KeepAlive(stream grpc.BidiStreamingServer[pb.KeepAliveRequest, pb.KeepAliveResponse]) error {
	return s.keep(stream)
}

func (s *schedulers) Schedule(stream grpc.BidiStreamingServer[pb.ScheduleRequest, pb.ScheduleResponse]) error {
	return s.schedule(stream)
}

func (s *schedulers) PollSchedulerNews(
	ctx context.Context, r *pb.PollSchedulerNewsRequest,
) (*pb.PollSchedulerNewsResponse, error) {
	return s.poll(ctx, r)
}

// server listens at a real socket.
type server struct {
	address string
	grpc    *grpc.Server

	mu    sync.Mutex
	conns []net.Conn
}

// serve starts a server with these services, at address or at a free one.
func serve(t *testing.T, address string, services ...any) *server {
	t.Helper()
	if address == "" {
		address = "127.0.0.1:0"
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	made := &server{address: listener.Addr().String(), grpc: grpc.NewServer()}
	for _, service := range services {
		switch service := service.(type) {
		case *transfers:
			pb.RegisterTransferServiceServer(made.grpc, service)
		case *pool:
			pb.RegisterPoolServiceServer(made.grpc, service)
		case *handshakes:
			pb.RegisterHandshakeServiceServer(made.grpc, service)
		case *leases:
			pb.RegisterLeaseServiceServer(made.grpc, service)
		case *fleetServer:
			pb.RegisterFleetServiceServer(made.grpc, service)
		case *schedulers:
			pb.RegisterSchedulerServiceServer(made.grpc, service)
		default:
			t.Fatalf("no service: %T", service)
		}
	}
	go made.grpc.Serve(recorded{listener, made})
	t.Cleanup(made.grpc.Stop)
	return made
}

// cut closes every connection, as a proxy or a network does.
func (s *server) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, conn := range s.conns {
		conn.Close()
	}
	s.conns = nil
}

type recorded struct {
	net.Listener
	server *server
}

func (l recorded) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.server.mu.Lock()
		l.server.conns = append(l.server.conns, conn)
		l.server.mu.Unlock()
	}
	return conn, err
}

func connect(t *testing.T, s *server, options Options) *Client {
	t.Helper()
	client, err := Connect(s.address, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// limited returns a context that ends with the test, or when the test hangs.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	t.Cleanup(cancel)
	return ctx
}

// refusal returns a status as a kvgrpc server makes it.
func refusal(code codes.Code, reason, next string, more ...protoadapt.MessageV1) error {
	info := &errdetails.ErrorInfo{Reason: reason, Domain: "kvgrpc.dev", Metadata: map[string]string{
		"next": next, "engine_id": "P", "incarnation": "7",
	}}
	made, err := status.New(code, "no").WithDetails(append([]protoadapt.MessageV1{info}, more...)...)
	if err != nil {
		panic(err)
	}
	return made.Err()
}

func header(seq, incarnation uint64) *pb.ResponseHeader {
	return &pb.ResponseHeader{EngineId: "P", Incarnation: incarnation, EventSeq: seq}
}

func after(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

// next returns the next item of a channel, and fails the test where none comes in time.
func next[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(soon):
		t.Fatal("nothing came")
		panic("not reached")
	}
}
