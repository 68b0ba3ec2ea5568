// Package kvgrpc is the Go client of kvgrpc, a service that moves KV-cache blocks between LLM engines.
//
// [Connect] returns a [Client] with the generated stubs of all services. Every unary call has a deadline, is retried
// when the server is unavailable, and carries an idempotency key. A call that fails returns an [*Error], which names
// the next step. The package also has the loops that callers of streams need: [Client.Wait], [Client.Watch],
// [Client.WatchEngine], [Client.KeepAlive], [CleanUp] and [Client.Scheduler].
//
// [ConnectFleet] asks which engines there are, and [NewResolver] lets a channel call the healthy ones of a model.
//
// The messages are in gen/kvgrpc/v1. Their comments are the contract.
package kvgrpc

import _ "embed"

// ServiceConfig tells gRPC which calls to retry: those that failed with UNAVAILABLE, a few times, with growing pauses.
// Streams are left out, because only the reader of a stream knows where to resume. ConnectPeer is left out, because its
// UNAVAILABLE comes from the other server, after the full time that a connection may take.
//
// [Connect] uses ServiceConfig. A program that uses the generated code alone passes it to
// grpc.WithDefaultServiceConfig.
//
//go:embed service_config.json
var ServiceConfig string
