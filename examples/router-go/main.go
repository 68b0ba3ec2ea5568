// Router serves OpenAI-style completions with prefill and decode engines. It moves the KV of each prompt from the
// prefill engine to the decode engine by kvgrpc.
//
//	go run . -prefill drive,http://127.0.0.1:8100,127.0.0.1:50051 -decode drive,http://127.0.0.1:8200,127.0.0.1:50052
//
// The files are:
//
//	front.go                 a request comes in, and its answer or error goes out
//	pull.go, push.go         the steps of a request, in their order
//	drive.go, compute.go     the steps at an engine whose pool this router manages
//	relay.go                 the steps at an engine that has its own scheduler, such as vLLM
//	members.go               engines that a fleet knows, and the pairs that it picks
//	fleet.go, choose.go      the engines, their state, and the choice of the next one
//	life.go                  the end of an engine's life
//	failure.go, retry.go     what a failure means, and what helps
//	attempt.go, cleanup.go   what a request holds at engines, and how all of it ends
//	tracing.go               one trace for each request
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"kvgrpc.dev/kvgrpc"
)

func main() {
	if err := run(); err != nil {
		slog.Error("the router ends", "error", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	listen  string
	mode    string
	prefill addresses
	decode  addresses
	// fleet are servers of FleetService, in place of lists of engines; model is the model of their engines, and http
	// says where engines have their HTTP servers.
	fleet, model string
	http         rules
	// tls and token are what the router shows leads and servers of the fleet: a folder with files of TLS, and a file.
	tls, token string
	// ttl is how long a prefill engine holds KV that no engine has fetched.
	ttl time.Duration
	// tries is the number of tries of one step, at all engines together.
	tries int
	// timeout limits a whole request.
	timeout time.Duration
	// drain limits how long requests may continue after SIGTERM.
	drain time.Duration
	// lifeGrace is how long an engine that cannot be reached counts as alive. A connection that was cut recovers
	// sooner.
	lifeGrace time.Duration
}

// cutGrace is how long requests may take to end once they are cut. The calls that take blocks or give them back are not
// cut with them and have 10 seconds.
const cutGrace = 15 * time.Second

func parse(arguments []string) (options, error) {
	o := options{lifeGrace: 3 * time.Second}
	flags := flag.NewFlagSet("router", flag.ContinueOnError)
	flags.StringVar(&o.listen, "listen", "127.0.0.1:8300", "`address` to serve HTTP at")
	flags.StringVar(&o.mode, "mode", "pull", "how KV travels: `pull or push`")
	flags.Var(&o.prefill, "prefill", "a prefill engine, `KIND,URL,LEAD`: drive or relay, its HTTP server, its lead; repeat it")
	flags.Var(&o.decode, "decode", "a decode engine, as `KIND,URL,LEAD`; repeat it")
	flags.StringVar(&o.fleet, "fleet", "", "`addresses` of servers of FleetService, in place of -prefill and -decode")
	flags.StringVar(&o.model, "model", "", "`name` of the model of the fleet's engines; empty means any")
	flags.Var(&o.http, "http", "where the fleet's engines have HTTP servers, `[ID=]KIND,URL`, with {host} for the lead's; repeat it")
	flags.StringVar(&o.tls, "tls-dir", "", "`folder` with tls.crt, tls.key and ca.crt, for calls to leads and to the fleet")
	flags.StringVar(&o.token, "token-file", "", "`file` with the bearer token of calls to leads and to the fleet")
	flags.DurationVar(&o.ttl, "ttl", 30*time.Second, "how long a prompt's KV waits for its decode engine")
	flags.IntVar(&o.tries, "tries", 4, "tries of one step of a request, at all engines together")
	flags.DurationVar(&o.timeout, "timeout", 10*time.Minute, "limit for a whole request")
	flags.DurationVar(&o.drain, "drain", 30*time.Second, "how long requests may go on after SIGTERM")
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	switch {
	case o.fleet != "" && (len(o.prefill)+len(o.decode) > 0 || len(o.http) == 0):
		return o, errors.New("-fleet takes the place of -prefill and -decode, and needs -http")
	case o.fleet == "" && (len(o.prefill) == 0 || len(o.decode) == 0):
		return o, errors.New("name at least one -prefill and one -decode engine, or a -fleet")
	case o.mode != "pull" && o.mode != "push":
		return o, fmt.Errorf("-mode is pull or push, not %q", o.mode)
	case o.tries < 1 || o.ttl <= 0 || o.timeout <= 0:
		return o, errors.New("-tries, -ttl and -timeout are positive")
	}
	return o, nil
}

// calls returns the options of clients of leads and of the fleet.
func (o options) calls() kvgrpc.Options {
	made := kvgrpc.Options{Traceparent: traceparent, TokenFile: o.token}
	if o.tls != "" {
		made.TLS = &kvgrpc.TLSFiles{Dir: o.tls}
	}
	return made
}

func run() error {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	stopping, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	flush, err := startTracing(stopping)
	if err != nil {
		return err
	}
	defer flush()
	router, err := newRouter(o)
	if err != nil {
		return err
	}
	defer router.close()
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return err
	}
	fmt.Printf("router: %s at http://%s\n", o.mode, listener.Addr())
	return serve(stopping, router, listener)
}

// serve takes requests until stopping ends, and then gives those under way a limited time to end.
func serve(stopping context.Context, router *router, listener net.Listener) error {
	// Requests do not inherit `stopping`, because they continue when the router is told to end.
	requests, cut := context.WithCancel(context.Background())
	defer cut()
	server := &http.Server{
		Handler:           router.handler(),
		BaseContext:       func(net.Listener) context.Context { return requests },
		ReadHeaderTimeout: 10 * time.Second,
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-stopping.Done():
	}
	router.drain()
	bounded, cancel := context.WithTimeout(context.Background(), router.options.drain)
	defer cancel()
	if err := server.Shutdown(bounded); err != nil {
		slog.Warn("requests are cut", "error", err)
		cut() // each is cleaned up as if its client had hung up
		bounded, cancel := context.WithTimeout(context.Background(), cutGrace)
		defer cancel()
		_ = server.Shutdown(bounded)
	}
	return nil
}
