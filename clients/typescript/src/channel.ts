// Options of the channel: which calls gRPC retries, how it reconnects, and how it detects a dead connection.

import type { ChannelOptions } from "@grpc/grpc-js";

/**
 * Calls that gRPC does not retry. The reader of a stream knows where to resume. The UNAVAILABLE of ConnectPeer comes
 * from the other server, after the full time that a connection may take.
 */
const NEVER_REPEATED = [
  { service: "kvgrpc.v1.HandshakeService", method: "ConnectPeer" },
  { service: "kvgrpc.v1.HandshakeService", method: "WatchEngine" },
  { service: "kvgrpc.v1.TransferService", method: "WatchTransfers" },
  { service: "kvgrpc.v1.LeaseService", method: "KeepAlive" },
  { service: "kvgrpc.v1.CallService", method: "StreamCalls" },
  { service: "kvgrpc.v1.SchedulerService", method: "Schedule" },
];

/** Retries UNAVAILABLE and nothing else, because it says that the server did not take the call. */
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
  // Keepalive detects a dead connection in 40 s. Pings are sent only while calls are open.
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.keepalive_permit_without_calls": 0,
  // By default the pause after a refused connection grows to two minutes, and every call in it fails at once. A server
  // that restarts is back in seconds.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 2_000,
};
