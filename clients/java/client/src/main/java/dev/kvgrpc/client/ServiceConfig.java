package dev.kvgrpc.client;

import java.util.List;
import java.util.Map;

/**
 * The calls that gRPC retries: those with UNAVAILABLE, because it says that the server did not take the call. Streams
 * are not retried. ConnectPeer is not retried either: its UNAVAILABLE comes from the other server, after the full time
 * that a connection may take.
 */
final class ServiceConfig {
  static final Map<String, ?> MAP = Map.of(
      "methodConfig",
      List.of(
          Map.of(
              "name", List.of(Map.of()),
              "waitForReady", false,
              "retryPolicy", Map.of(
                  "maxAttempts", 4.0,
                  "initialBackoff", "0.1s",
                  "maxBackoff", "2s",
                  "backoffMultiplier", 3.0,
                  "retryableStatusCodes", List.of("UNAVAILABLE"))),
          Map.of(
              "name", List.of(
                  method("HandshakeService", "ConnectPeer"),
                  method("HandshakeService", "WatchEngine"),
                  method("TransferService", "WatchTransfers"),
                  method("LeaseService", "KeepAlive"),
                  method("CallService", "StreamCalls"),
                  method("SchedulerService", "Schedule")),
              "waitForReady", false)));

  private ServiceConfig() {}

  private static Map<String, ?> method(String service, String method) {
    return Map.of("service", "kvgrpc.v1." + service, "method", method);
  }
}
