// Keeps leases alive over one KeepAlive stream.
//
// Rules:
// * Each lease is renewed when a third of its remaining time has passed, so that two renewals may fail. Leases that are
//   due at about the same time go in one message.
// * A stream that breaks is opened again, after growing pauses. Nothing else is retried.
// * A lease that is over is renewed no more. Its holder gets its state and the reason.
// * The holder of a lease that is not kept any more is told, so that nobody waits for an end that nobody watches for.

import { status } from "@grpc/grpc-js";
import {
  KeepAliveRequest,
  LeaseServiceService,
  LeaseState,
  type KeepAliveResponse,
  type RenewedLease,
} from "../gen/kvgrpc/v1/lease.js";
import type { CallOptions, Caller } from "./caller.js";
import { duration } from "./durations.js";
import { KvGrpcError } from "./errors.js";
import { HeldLease, type AnyLease } from "./held-lease.js";
import { Pauses } from "./pauses.js";
import { endedStream, passing } from "./retryable.js";
import type { Stream } from "./stream.js";

export interface KeepAliveOptions extends Omit<CallOptions, "timeoutMs" | "signal"> {
  /** TTL of each renewal in milliseconds. By default it is the TTL that each lease was granted with. */
  ttlMs?: number;
}

/** Renewals that are due within so many milliseconds are sent with one that is due now. */
const TOGETHER_MS = 250;
/**
 * Largest number of leases in one message. A server takes 10,000, but at most 4 MB, and a grant has up to 700 bytes.
 */
const BATCH = 5_000;
/** Longest wait for one answer, in milliseconds. */
const ANSWER_MS = 10_000;

export class Keeper {
  private readonly held = new Set<HeldLease>();
  private readonly closing = new AbortController();
  private readonly pauses = new Pauses();
  private stream: Stream<KeepAliveRequest, KeepAliveResponse> | undefined;
  private wake = () => {};
  private running = false;

  constructor(
    private readonly caller: Caller,
    leases: readonly AnyLease[],
    private readonly options: KeepAliveOptions,
    private readonly onClose: () => void,
  ) {
    for (const lease of leases) this.add(lease);
  }

  /** The leases that are kept, in the order of their additions. Leases that are over are left out. */
  get leases(): HeldLease[] {
    return [...this.held];
  }

  /** Renews this lease too, from now on. */
  add(lease: AnyLease): HeldLease {
    this.closing.signal.throwIfAborted();
    const held = new HeldLease(lease);
    this.held.add(held);
    void held.over.then(() => this.held.delete(held));
    this.start();
    return held;
  }

  /** Stops renewing this lease. It ends by itself, unless it is released. */
  drop(lease: HeldLease): void {
    lease.forget();
    this.held.delete(lease);
    this.wake();
  }

  /** Stops all renewals. It releases no lease. */
  close(): void {
    this.closing.abort();
    for (const lease of this.held) this.drop(lease);
    this.disconnect();
    this.onClose();
  }

  private start(): void {
    if (this.running) return this.wake();
    this.running = true;
    // The start is deferred, so that leases that are added together are renewed together.
    queueMicrotask(() => void this.run());
  }

  private async run(): Promise<void> {
    try {
      while (this.held.size > 0 && !this.closing.signal.aborted) await this.step();
    } catch (error) {
      // Renewing was refused. No holder may rely on a lease that is not renewed.
      if (!this.closing.signal.aborted) this.fail(error);
    } finally {
      this.running = false;
      this.disconnect();
    }
  }

  private async step(): Promise<void> {
    const now = performance.now();
    const due = this.leases.sort((a, b) => a.dueAt - b.dueAt);
    const first = due[0]!.dueAt;
    if (first > now) return this.idle(first - now);
    const batch = due.filter((lease) => lease.dueAt <= now + TOGETHER_MS).slice(0, BATCH);
    try {
      const rows = await this.renew(batch);
      batch.forEach((lease, i) => lease.answered(rows[i]!, now));
      this.pauses.reset();
    } catch (error) {
      this.disconnect();
      this.closing.signal.throwIfAborted();
      await this.pauses.next(passing(error).retryDelayMs, this.closing.signal);
    }
  }

  /** Returns one row for each lease, in order. */
  private async renew(batch: HeldLease[]): Promise<RenewedLease[]> {
    const { ttlMs, ...call } = this.options;
    // The call waits for the connection, because a lease has no time for both pauses, the keeper's and the channel's.
    const waiting = { ...call, waitForReady: true };
    const stream = (this.stream ??= this.caller.stream(LeaseServiceService.keepAlive, undefined, waiting));
    const ttl = ttlMs === undefined ? undefined : duration(ttlMs);
    const timer = setTimeout(() => stream.cancel(), answerMs(batch));
    try {
      await stream.send(KeepAliveRequest.fromPartial({ leases: batch.map((lease) => lease.ref), ttl }));
      const reply = await stream.next();
      if (!reply) throw endedStream("the renewals");
      if (reply.leases.length !== batch.length) {
        throw new KvGrpcError(status.INTERNAL, `${batch.length} leases were renewed with ${reply.leases.length} rows`);
      }
      return reply.leases;
    } finally {
      clearTimeout(timer);
    }
  }

  private async idle(ms: number): Promise<void> {
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    this.wake = () => {};
  }

  private fail(error: unknown): void {
    const failed =
      error instanceof KvGrpcError ? error : new KvGrpcError(status.UNKNOWN, String(error), {}, { cause: error });
    const end = { state: LeaseState.LEASE_STATE_UNSPECIFIED, reason: failed.reason, error: failed };
    for (const lease of this.held) lease.finish(end);
    this.held.clear();
  }

  private disconnect(): void {
    this.stream?.cancel();
    this.stream = undefined;
    this.wake();
  }
}

/** Returns half of what the first lease of the batch has left, so that there is time for another stream. */
function answerMs(batch: HeldLease[]): number {
  const left = batch.map((lease) => lease.remainingMs).filter((ms) => ms > 0);
  return Math.min(Math.max(Math.min(...left) / 2, 100), ANSWER_MS);
}
