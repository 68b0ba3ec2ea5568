// Watching an engine: how it is, and that it cannot be reached, for as long as the reader reads.

import { status } from "@grpc/grpc-js";
import { HandshakeServiceService, WatchEngineRequest, type WatchEngineResponse } from "../gen/kvgrpc/v1/handshake.js";
import type { CallOptions, Caller } from "./caller.js";
import { duration } from "./durations.js";
import { KvGrpcError } from "./errors.js";
import { Pauses } from "./pauses.js";
import { endedStream } from "./retryable.js";
import type { Stream } from "./stream.js";

/** A server says something every 5 s. One that misses three times is stopped, or the connection is dead. */
const SILENCE_MS = 15_000;

/** A repetition does not make these better. */
const FINAL = new Set([
  status.INVALID_ARGUMENT,
  status.UNIMPLEMENTED,
  status.UNAUTHENTICATED,
  status.PERMISSION_DENIED,
]);

export interface WatchEngineOptions extends Omit<CallOptions, "timeoutMs"> {
  /** Told at most once in this time; 0.1 s unless stated. */
  minIntervalMs?: number;
  /** A server that is silent for so long counts as unreachable; 15 s unless stated. */
  silenceMs?: number;
}

/** How the engine is, or why it cannot be reached. Another `header.incarnation`: all of the life before is gone. */
export type EngineNews = ({ reachable: true } & WatchEngineResponse) | { reachable: false; error: KvGrpcError };

/**
 * Tells how an engine is, at once and whenever it has changed. Connects again for ever; that the engine is unreachable
 * is told once, until it answers again.
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
