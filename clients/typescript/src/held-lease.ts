// One lease that is kept alive, and what is known of it.

import { FailureReason, type Grant } from "../gen/kvgrpc/v1/common.js";
import { LeaseRef, LeaseState, type Lease, type RenewedLease } from "../gen/kvgrpc/v1/lease.js";
import { milliseconds } from "./durations.js";
import { isLeaseOver, reasonName } from "./enums.js";
import type { KvGrpcError, Reason } from "./errors.js";

/** A lease by its id, by a grant that stands on it, or as a reply gave it. */
export type AnyLease = string | Grant | Lease | LeaseRef;

/** The end of a lease. */
export interface LeaseEnd {
  /**
   * DONE: the consumers have their KV. UNSPECIFIED: the server does not know the lease. LIVE: the lease is not kept any
   * more, because it was dropped or because its keeper or client was closed; its remaining time continues.
   */
  state: LeaseState;
  /** The reason that the lease could not be renewed. */
  reason: Reason;
  /** Error of the call, where renewing itself was refused. */
  error?: KvGrpcError;
}

/** Shortest time between two renewals of a lease in milliseconds, even when its cap leaves it little time. */
const SHORTEST_MS = 100;
/** Time in milliseconds to the next attempt for a lease that lives and could not be renewed. */
const AGAIN_MS = 1_000;

export class HeldLease {
  readonly ref: LeaseRef;
  /** Resolves when the lease is over or not kept any more. */
  readonly over: Promise<LeaseEnd>;
  /** Time of the next renewal, by this process's monotonic clock. */
  dueAt = 0;
  private end: LeaseEnd | undefined;
  private leftUntil = 0;
  private lastState = LeaseState.LEASE_STATE_LIVE;
  private expiry: NodeJS.Timeout | undefined;
  private resolve!: (end: LeaseEnd) => void;

  constructor(lease: AnyLease) {
    this.ref = leaseRef(lease);
    this.over = new Promise((resolve) => (this.resolve = resolve));
  }

  /** State in the last answer; LIVE before the first answer. */
  get state(): LeaseState {
    return this.end?.state ?? this.lastState;
  }

  get isOver(): boolean {
    return this.end !== undefined && this.end.state !== LeaseState.LEASE_STATE_LIVE;
  }

  /**
   * Time that is certainly left. It counts from when the renewal was sent, so it never exceeds what the server grants.
   */
  get remainingMs(): number {
    return this.isOver ? 0 : Math.max(this.leftUntil - performance.now(), 0);
  }

  /** Takes the server's answer to a renewal that was sent at `sentAt`. */
  answered(row: RenewedLease, sentAt: number): void {
    if (this.end) return; // dropped while its renewal was under way
    const { reason } = row;
    const remainingMs = milliseconds(row.remaining);
    const refused = reason !== FailureReason.FAILURE_REASON_UNSPECIFIED;
    if (isLeaseOver(row) || (refused && row.state !== LeaseState.LEASE_STATE_LIVE)) {
      this.finish({ state: row.state, reason: refused ? reasonName(reason) : "UNSPECIFIED" });
    } else if (refused) {
      this.dueAt = sentAt + AGAIN_MS;
    } else {
      this.lastState = row.state;
      this.leftUntil = sentAt + remainingMs;
      this.dueAt = sentAt + Math.max(remainingMs / 3, SHORTEST_MS);
      this.expireIn(this.leftUntil - performance.now());
    }
  }

  /** Ends the lease. Only the first end counts. */
  finish(end: LeaseEnd): void {
    clearTimeout(this.expiry);
    if (this.end) return;
    this.end = end;
    this.resolve(end);
  }

  /** Stops renewing. The remaining time of the lease continues, and nothing more is reported. */
  forget(): void {
    this.finish({ state: LeaseState.LEASE_STATE_LIVE, reason: "UNSPECIFIED" });
  }

  /**
   * Ends the lease after this time. A lease that was not renewed in time is over for its holder, whatever the server
   * knows.
   */
  private expireIn(ms: number): void {
    clearTimeout(this.expiry);
    const expired: LeaseEnd = { state: LeaseState.LEASE_STATE_EXPIRED, reason: "LEASE_EXPIRED" };
    this.expiry = setTimeout(() => this.finish(expired), Math.max(ms, 0));
  }
}

function leaseRef(lease: AnyLease): LeaseRef {
  if (typeof lease === "string") return LeaseRef.fromPartial({ leaseId: lease });
  if ("token" in lease) return LeaseRef.fromPartial({ grant: lease });
  if ("state" in lease) return LeaseRef.fromPartial({ leaseId: lease.leaseId });
  return lease;
}
