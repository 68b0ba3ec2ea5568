// Watches an engine: its status, and whether it can be reached, for as long as the reader reads.

import { status } from "@grpc/grpc-js";
import { HandshakeServiceService, WatchEngineRequest, type WatchEngineResponse } from "../gen/kvgrpc/v1/handshake.js";
import type { CallOptions, Caller } from "./caller.js";
import { duration } from "./durations.js";
import { KvGrpcError } from "./errors.js";
import { Pauses } from "./pauses.js";
import { endedStream } from "./retryable.js";
import type { Stream } from "./stream.js";

/**
 * Silence in milliseconds after which an engine counts as unreachable. A server sends a message at least every 5 s. If
 * three are missing, the server has stopped or the connection is dead.
 */
const SILENCE_MS = 15_000;

/** Codes that a retry does not change. */
const FINAL = new Set([
  status.INVALID_ARGUMENT,
  status.UNIMPLEMENTED,
  status.UNAUTHENTICATED,
  status.PERMISSION_DENIED,
]);

export interface WatchEngineOptions extends Omit<CallOptions, "timeoutMs"> {
  /** Shortest time in milliseconds between two messages; 100 by default. */
  minIntervalMs?: number;
  /** Silence in milliseconds after which the server counts as unreachable; 15,000 by default. */
  silenceMs?: number;
}

/**
 * The status of the engine, or why it cannot be reached. A new `header.incarnation` means that the previous life is
 * gone.
 */
export type EngineNews = ({ reachable: true } & WatchEngineResponse) | { reachable: false; error: KvGrpcError };

/**
 * Yields the status of an engine, at once and whenever it changes. It reconnects without limit. An unreachable engine
 * is reported once, until it answers again.
 */
export async function* watchEngine(
  caller: Caller,
  options: WatchEngineOptions = {},
): AsyncGenerator<EngineNews, void, void> {
  const { minIntervalMs, silenceMs = SILENCE_MS, ...call } = options;
  const minInterval = minIntervalMs === undefined ? undefined : duration(minIntervalMs);
  const request = WatchEngineRequest.fromPartial({ minInterval });
  const pauses = new Pauses();
  let reachable = true;
  for (;;) {
    let error = endedStream("the watch of the engine");
    const stream = caller.stream(HandshakeServiceService.watchEngine, request, call);
    try {
      for (;;) {
        const message = await nextWithin(stream, silenceMs);
        if (!message) break;
        reachable = true;
        pauses.reset();
        yield { reachable: true, ...message };
      }
    } catch (failed) {
      if (!(failed instanceof KvGrpcError) || FINAL.has(failed.code)) throw failed;
      error = failed;
    } finally {
      stream.cancel();
    }
    if (reachable) yield { reachable: false, error };
    reachable = false;
    await pauses.next(error.retryDelayMs, call.signal);
  }
}

async function nextWithin(
  stream: Stream<WatchEngineRequest, WatchEngineResponse>,
  silenceMs: number,
): Promise<WatchEngineResponse | undefined> {
  let silent = false;
  const timer = setTimeout(() => {
    silent = true;
    stream.cancel();
  }, silenceMs);
  try {
    return await stream.next();
  } catch (error) {
    if (silent) throw new KvGrpcError(status.UNAVAILABLE, `the server was silent for ${silenceMs / 1000} s`);
    throw error;
  } finally {
    clearTimeout(timer);
  }
}
