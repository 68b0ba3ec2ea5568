// Package kvgrpc is the Go client of kvgrpc, a service that moves KV-cache blocks between LLM engines.
//
// [Connect] gives a [Client] with the generated stubs of all services. Their calls have a deadline, are repeated when
// the server is unavailable, carry an idempotency key, and fail with an [*Error] that says what to do. On top of them
// are the loops that each caller of streams needs: [Client.Wait], [Client.Watch], [Client.WatchEngine],
// [Client.KeepAlive], [CleanUp] and [Client.Scheduler].
//
// The messages are those of gen/kvgrpc/v1; the comments there are the contract.
package kvgrpc

import _ "embed"

// ServiceConfig tells gRPC which calls to repeat by itself: those that failed with UNAVAILABLE, a few times, with
// growing pauses. Streams are left out, since only their reader knows where to go on; so is ConnectPeer, whose
// UNAVAILABLE comes from the other server after all the time that a connection may take.
//
// [Connect] uses it. With generated code alone, pass it to grpc.WithDefaultServiceConfig.
//
//go:embed service_config.json
var ServiceConfig string
