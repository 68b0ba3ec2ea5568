package kvgrpc

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// lead serves as an engine's lead, which answers with its id.
func lead(t *testing.T, id, address string) *server {
	return serve(t, address, &pool{
		allocate: func(context.Context, *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
			return &pb.AllocateBlocksResponse{Header: &pb.ResponseHeader{EngineId: id}}, nil
		},
	})
}

// channel connects to a target, with these servers of a fleet.
func channel(t *testing.T, target string, options Options, servers ...*server) *Client {
	t.Helper()
	var addresses []string
	for _, server := range servers {
		addresses = append(addresses, server.address)
	}
	options.DialOptions = append(options.DialOptions, grpc.WithResolvers(NewResolver(Options{}, addresses...)))
	client, err := Connect(target, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// reached returns the id of the engine that a call reaches.
func reached(ctx context.Context, client *Client) (string, error) {
	reply, err := client.Pool.AllocateBlocks(ctx, &pb.AllocateBlocksRequest{})
	return reply.GetHeader().GetEngineId(), err
}

// allReached returns the ids of the engines that many calls reach.
func allReached(t *testing.T, client *Client) string {
	t.Helper()
	var found []*pb.FleetEngine
	seen := map[string]bool{}
	for range 64 {
		id, err := reached(limited(t), client)
		if err != nil {
			t.Fatal(err)
		}
		seen[id] = true
	}
	for _, id := range []string{"a", "b", "c", "d"} {
		if seen[id] {
			found = append(found, member(id, healthy))
		}
	}
	return ids(found)
}

func until(t *testing.T, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(soon); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not come")
		}
	}
}

func TestCallsGoToHealthyEnginesOnly(t *testing.T) {
	a, b, c, d := lead(t, "a", ""), lead(t, "b", ""), lead(t, "c", ""), lead(t, "d", "")
	there := newFleetServer(1, member("a", healthy, a.address), member("b", healthy, nobody(t).address, b.address),
		member("c", draining, c.address), member("d", failed, d.address))
	client := channel(t, "kvgrpc:///m", Options{}, serve(t, "", there))
	until(t, func() bool { return allReached(t, client) == "a b" })
	there.put(member("d", healthy, d.address), member("a", draining, a.address))
	until(t, func() bool { return allReached(t, client) == "b d" })
	if allReached(t, client) != "b d" {
		t.Fatal("a call went to a draining engine")
	}
	there.remove("b")
	until(t, func() bool { return allReached(t, client) == "d" })
}

func TestADeadEngineGetsNoCallsBeforeTheFleetKnows(t *testing.T) {
	a, b := lead(t, "a", ""), lead(t, "b", "")
	there := newFleetServer(1, member("a", healthy, a.address), member("b", healthy, b.address))
	client := channel(t, "kvgrpc:///m", Options{}, serve(t, "", there))
	until(t, func() bool { return allReached(t, client) == "a b" })
	a.grpc.Stop()
	if got := allReached(t, client); got != "b" {
		t.Fatal(got)
	}
}

func TestCallsGoOnWhileNoServerOfTheFleetAnswersAndWhenAnotherBegins(t *testing.T) {
	a, b := lead(t, "a", ""), lead(t, "b", "")
	one := serve(t, "", newFleetServer(1, member("a", healthy, a.address)))
	client := channel(t, "kvgrpc:///m", Options{}, one)
	until(t, func() bool { return allReached(t, client) == "a" })
	one.grpc.Stop()
	if got := allReached(t, client); got != "a" {
		t.Fatal(got)
	}
	again := newFleetServer(2, member("a", notAsked, a.address), member("b", healthy, b.address))
	serve(t, one.address, again)
	until(t, func() bool { return allReached(t, client) == "a b" })
}

func TestACallThatNamesAnEngineReachesItAlsoWhileItDrains(t *testing.T) {
	a, b := lead(t, "a", ""), lead(t, "b", "")
	there := newFleetServer(1, member("a", draining, a.address), member("b", healthy, b.address))
	client := channel(t, "kvgrpc:///m", Options{}, serve(t, "", there))
	until(t, func() bool { return allReached(t, client) == "b" })
	for range 8 {
		if id, err := reached(WithEngine(limited(t), "a"), client); err != nil || id != "a" {
			t.Fatal(id, err)
		}
	}
	there.remove("a")
	until(t, func() bool {
		_, err := reached(WithEngine(limited(t), "a"), client)
		return status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), `"a"`)
	})
}

func TestACallFailsWhereNoEngineTakesWork(t *testing.T) {
	client := channel(t, "kvgrpc:///m", Options{}, serve(t, "", newFleetServer(1)))
	if _, err := reached(limited(t), client); status.Code(err) != codes.Unavailable {
		t.Fatal(err)
	}
	client = channel(t, "kvgrpc:///m", Options{}, nobody(t))
	_, err := reached(limited(t), client)
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "refused") {
		t.Fatal("the error does not say that the fleet is away:", err)
	}
}

func TestATargetNamesModelRoleAndServers(t *testing.T) {
	a := lead(t, "a", "")
	there := newFleetServer(1, member("a", healthy, a.address))
	server := serve(t, "", there)
	for _, target := range []string{
		"kvgrpc://" + server.address + "/org/m?role=decode",
		"kvgrpc:///org/m?role=prefill&server=" + nobody(t).address + "&server=" + server.address,
	} {
		if id, err := reached(limited(t), channel(t, target, Options{})); err != nil || id != "a" {
			t.Fatal(target, id, err)
		}
	}
	for _, target := range []string{"kvgrpc:///m", "kvgrpc:///m?role=cook&server=x", "kvgrpc:///m?mode=x&server=x"} {
		if _, err := reached(limited(t), channel(t, target, Options{})); err == nil {
			t.Fatal(target)
		}
	}
}

func TestTheLessLoadedOfTwoEnginesGetsACall(t *testing.T) {
	idle, busy := &fleetChild{load: 0.1, underway: new(atomic.Int64)}, &fleetChild{load: 0.2, underway: new(atomic.Int64)}
	for _, among := range [][]*fleetChild{{idle, busy}, {busy, idle}} {
		if lessLoaded(among) != idle {
			t.Fatal("the busy one")
		}
	}
	idle.underway.Store(2)
	if lessLoaded([]*fleetChild{idle, busy}) != busy {
		t.Fatal("calls that are under way do not count")
	}
}

func TestAnEngineNeedsACertificateForTheAddressOfItsEntry(t *testing.T) {
	cert, roots := certificate(t, "127.0.0.1")
	secured := func(id string) string {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		made := grpc.NewServer(grpc.Creds(credentials.NewServerTLSFromCert(&cert)))
		pb.RegisterPoolServiceServer(made, &pool{
			allocate: func(context.Context, *pb.AllocateBlocksRequest) (*pb.AllocateBlocksResponse, error) {
				return &pb.AllocateBlocksResponse{Header: &pb.ResponseHeader{EngineId: id}}, nil
			},
		})
		go made.Serve(listener)
		t.Cleanup(made.Stop)
		return listener.Addr().String()
	}
	a, b := secured("a"), secured("b")
	_, port, _ := net.SplitHostPort(b)
	there := newFleetServer(1, member("a", healthy, a), member("b", healthy, "localhost:"+port))
	options := Options{Credentials: credentials.NewTLS(&tls.Config{RootCAs: roots})}
	client := channel(t, "kvgrpc:///m", options, serve(t, "", there))
	if id, err := reached(WithEngine(limited(t), "a"), client); err != nil || id != "a" {
		t.Fatal(id, err)
	}
	_, err := reached(WithEngine(limited(t), "b"), client)
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "localhost") {
		t.Fatal(err)
	}
}

// certificate returns a certificate for an IP address, and the CAs that vouch for it.
func certificate(t *testing.T, ip string) (tls.Certificate, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.ParseIP(ip)}, IsCA: true, BasicConstraintsValid: true,
	}
	made, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(made)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(parsed)
	return tls.Certificate{Certificate: [][]byte{made}, PrivateKey: key}, roots
}
