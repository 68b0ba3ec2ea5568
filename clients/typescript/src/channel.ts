// The channel: which calls gRPC repeats by itself, how it connects again, how it notices a dead connection.

import type { ChannelOptions } from "@grpc/grpc-js";

/** Calls that gRPC does not repeat: whoever reads a stream knows where to go on, and the UNAVAILABLE of ConnectPeer is
 * the other server's, after the whole time that a connection may take. */
const NEVER_REPEATED = [
  { service: "kvgrpc.v1.HandshakeService", method: "ConnectPeer" },
  { service: "kvgrpc.v1.HandshakeService", method: "WatchEngine" },
  { service: "kvgrpc.v1.TransferService", method: "WatchTransfers" },
  { service: "kvgrpc.v1.LeaseService", method: "KeepAlive" },
  { service: "kvgrpc.v1.CallService", method: "StreamCalls" },
  { service: "kvgrpc.v1.SchedulerService", method: "Schedule" },
];

/** Retries UNAVAILABLE and nothing else: it says that the server did not take the call. */
export const SERVICE_CONFIG = {
  methodConfig: [
    {
      name: [{}],
      waitForReady: false,
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.1s",
        maxBackoff: "2s",
        backoffMultiplier: 3,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
    { name: NEVER_REPEATED, waitForReady: false },
  ],
};

export const CHANNEL_OPTIONS: ChannelOptions = {
  "grpc.service_config": JSON.stringify(SERVICE_CONFIG),
  // A connection whose other end is gone without a word is noticed in 40 s. Pings go out while calls are open only.
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.keepalive_permit_without_calls": 0,
  // The pause after a refused connection grows to two minutes by default, in which every call fails at once. A server
  // that restarts is back in seconds.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 2_000,
};
