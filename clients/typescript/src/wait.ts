// Waits for one transfer, for longer than one WaitTransfer may take and across restarts of a connection.

import type { LayerRange } from "../gen/kvgrpc/v1/common.js";
import {
  TransferServiceService,
  WaitCondition,
  WaitTransferRequest,
  type Transfer,
  type WaitTransferResponse,
} from "../gen/kvgrpc/v1/transfer.js";
import type { CallOptions, Caller } from "./caller.js";
import { duration } from "./durations.js";
import { Pauses } from "./pauses.js";
import { passing } from "./retryable.js";

/**
 * Wait of one call in milliseconds: half of what a server allows, so that proxies with a limit of one minute let it
 * pass.
 */
const ONE_WAIT_MS = 30_000;
/** Default wait in milliseconds. It exceeds the sum of a server's defaults for queue, transfer and settle. */
const DEFAULT_WAIT_MS = 90_000;
/** Time for the answer in milliseconds, in addition to the time that the server waits. */
const ANSWER_MS = 10_000;

export interface WaitOptions extends Omit<CallOptions, "timeoutMs"> {
  /** Condition to wait for; ENDED by default. */
  until?: WaitCondition;
  /** Time of the wait in milliseconds; 90,000 by default. */
  timeoutMs?: number;
  /** Layers whose arrival also ends the wait. */
  layers?: LayerRange;
}

export interface Waited {
  /** The transfer in its last known state. */
  transfer: Transfer;
  /** Whether the condition was met. False means that the time was over. */
  conditionMet: boolean;
}

/**
 * Waits until the condition is met or the time is over. A server that is away or too busy does not end the wait while
 * time is left. The abort of the signal and the close of the client end it.
 */
export function wait(caller: Caller, transferId: string, options: WaitOptions = {}): Promise<Waited> {
  return caller.last(options.signal, (signal) => waitUntil(caller, transferId, { ...options, signal }));
}

async function waitUntil(caller: Caller, transferId: string, options: WaitOptions): Promise<Waited> {
  const { until = WaitCondition.WAIT_CONDITION_ENDED, timeoutMs = DEFAULT_WAIT_MS, layers, ...call } = options;
  const end = performance.now() + timeoutMs;
  const pauses = new Pauses();
  for (;;) {
    // The wait is at least 1 ms, so that the first call asks even where no time is left.
    const sentAt = performance.now();
    const onceMs = Math.max(Math.min(end - sentAt, ONE_WAIT_MS), 1);
    const request = WaitTransferRequest.fromPartial({ transferId, until, layers, timeout: duration(onceMs) });
    let reply: WaitTransferResponse;
    try {
      const times = { ...call, timeoutMs: onceMs + ANSWER_MS };
      reply = await caller.unary(TransferServiceService.waitTransfer, request, times);
    } catch (error) {
      const { retryDelayMs = 0 } = passing(error);
      const left = end - performance.now();
      if (left <= 0) throw error;
      // The pause ends with the time that is left. Then the last call follows.
      await pauses.next(retryDelayMs, call.signal, left);
      continue;
    }
    if (reply.conditionMet || performance.now() >= end) {
      return { transfer: reply.transfer!, conditionMet: reply.conditionMet };
    }
    // A server may answer "not met" early. The pause prevents a busy loop.
    if (performance.now() - sentAt < onceMs / 2) await pauses.next(0, call.signal, end - performance.now());
    else pauses.reset();
  }
}
