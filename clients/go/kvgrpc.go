// Package kvgrpc holds what a Go client of kvgrpc needs beside the generated code in gen/kvgrpc/v1: the service config.
package kvgrpc

import _ "embed"

// ServiceConfig tells gRPC which calls to repeat by itself: those that failed with UNAVAILABLE, a few times, with
// growing pauses. Not the streams: the reader of a stream knows where to go on. Use it with
// grpc.WithDefaultServiceConfig.
//
//go:embed service_config.json
var ServiceConfig string
