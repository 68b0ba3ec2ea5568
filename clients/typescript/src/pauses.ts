// Growing pauses between attempts.

import { setTimeout as sleep } from "node:timers/promises";

const FIRST_MS = 100;
const LONGEST_MS = 2_000;

/** Pauses from 0.1 s to 2 s. They vary a little, so that the clients of a lost server do not all come back at once. */
export class Pauses {
  private ms = FIRST_MS;

  /**
   * Waits at least as long as a server asked for, and at most `mostMs`. It throws the signal's reason when that aborts.
   */
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

  /** Makes the next pause short again, after a successful attempt. */
  reset(): void {
    this.ms = FIRST_MS;
  }
}
