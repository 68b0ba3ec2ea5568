// Waiting for one transfer, longer than one WaitTransfer may take, and across restarts of a connection.

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

/** Of one call; half of what a server allows, so that proxies with a limit of a minute let it pass. */
const ONE_WAIT_MS = 30_000;
/** More than a server's defaults for queue, transfer and settle together. */
const DEFAULT_WAIT_MS = 90_000;
/** Of the answer, beyond the time that the server waits. */
const ANSWER_MS = 10_000;

export interface WaitOptions extends Omit<CallOptions, "timeoutMs"> {
  /** What to wait for; ENDED unless stated. */
  until?: WaitCondition;
  /** How long; 90 s unless stated. */
  timeoutMs?: number;
  /** Also enough: these layers are done. */
  layers?: LayerRange;
}

export interface Waited {
  /** The transfer as it was last seen. */
  transfer: Transfer;
  /** False: the time was over. */
  conditionMet: boolean;
}

/**
 * Waits until the condition is met or the time is over. A server that is away or too busy is no end while time is left; the
 * end of the signal and of the client is.
 */
export function wait(caller: Caller, transferId: string, options: WaitOptions = {}): Promise<Waited> {
  return caller.last(options.signal, (signal) => waitUntil(caller, transferId, { ...options, signal }));
}

async function waitUntil(caller: Caller, transferId: string, options: WaitOptions): Promise<Waited> {
  const { until = WaitCondition.WAIT_CONDITION_ENDED, timeoutMs = DEFAULT_WAIT_MS, layers, ...call } = options;
  const end = performance.now() + timeoutMs;
  const pauses = new Pauses();
  for (;;) {
    // At least a moment: the first call asks, also where no time is left.
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
      // No longer than there is time: then comes a last look.
      await pauses.next(retryDelayMs, call.signal, left);
      continue;
    }
    if (reply.conditionMet || performance.now() >= end) {
      return { transfer: reply.transfer!, conditionMet: reply.conditionMet };
    }
    // A server that answers before the time is over, and says no, must not be asked in a tight loop.
    if (performance.now() - sentAt < onceMs / 2) await pauses.next(0, call.signal, end - performance.now());
    else pauses.reset();
  }
}
