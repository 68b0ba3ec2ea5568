// Growing pauses between attempts.

import { setTimeout as sleep } from "node:timers/promises";

const FIRST_MS = 100;
const LONGEST_MS = 2_000;

/** Pauses from 0.1 s to 2 s, a little uneven so that clients that lost one server do not come back all at once. */
export class Pauses {
  private ms = FIRST_MS;

  /** Waits; at least as long as a server asked for, at most `mostMs`. Throws the signal's reason when it aborts. */
  async next(atLeastMs = 0, signal?: AbortSignal, mostMs = Infinity): Promise<void> {
    const pause = Math.min(Math.max(this.ms * (0.8 + 0.4 * Math.random()), atLeastMs), mostMs);
    this.ms = Math.min(this.ms * 2, LONGEST_MS);
    try {
      await sleep(pause, undefined, { signal });
    } catch (error) {
      signal?.throwIfAborted();
      throw error;
    }
  }

  /** The attempt was a success: the next pause is short again. */
  reset(): void {
    this.ms = FIRST_MS;
  }
}
