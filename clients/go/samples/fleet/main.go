// Fleet calls the engines of a model that a fleet knows, and prints which engine each call reached.
//
//	go run ./samples/fleet -fleet 127.0.0.1:50050 -model m -role decode
//
// Each row has the time of the call's end in seconds since 1970, and the id of the engine that answered or the call's
// error.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"time"

	"google.golang.org/grpc"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

func main() {
	fleet := flag.String("fleet", "127.0.0.1:50050", "`addresses` of servers of the fleet, separated by commas")
	model := flag.String("model", "", "`name` of the model; empty means any")
	role := flag.String("role", "", "prefill, decode or both; empty means any")
	engine := flag.String("engine", "", "`id` of the engine that gets all calls; empty means the fleet's choice")
	every := flag.Duration("every", time.Second, "`time` between two calls")
	count := flag.Int("count", 0, "number of calls; 0 means until it is interrupted")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if *engine != "" {
		ctx = kvgrpc.WithEngine(ctx, *engine)
	}
	if err := run(ctx, os.Stdout, strings.Split(*fleet, ","), target(*model, *role), *every, *count); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// target returns the target of a channel to the engines of a model that play a role.
func target(model, role string) string {
	made := url.URL{Scheme: kvgrpc.Scheme, Path: "/" + model}
	if role != "" {
		made.RawQuery = url.Values{"role": {role}}.Encode()
	}
	return made.String()
}

func run(ctx context.Context, out io.Writer, fleet []string, target string, every time.Duration, count int) error {
	client, err := kvgrpc.Connect(target, kvgrpc.Options{
		DialOptions: []grpc.DialOption{grpc.WithResolvers(kvgrpc.NewResolver(kvgrpc.Options{}, fleet...))},
	})
	if err != nil {
		return err
	}
	defer client.Close()
	for number := 1; ; number++ {
		reply, err := client.Handshake.GetEngine(ctx, &pb.GetEngineRequest{})
		if ctx.Err() != nil {
			return nil
		}
		said := reply.GetHeader().GetEngineId()
		if err != nil {
			said = "error " + strings.ReplaceAll(err.Error(), "\n", " ")
		}
		fmt.Fprintf(out, "%.6f %s\n", float64(time.Now().UnixMicro())/1e6, said)
		if number == count {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
	}
}
