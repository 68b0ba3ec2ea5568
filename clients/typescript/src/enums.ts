// The meaning of the schema's enum values. A server may be newer than this library, so an unknown value reads as the
// safe case: an unknown state is not an end, unknown memory is in quarantine, and an unknown reason is not retried.

import { FailureReason, NextStep, type Failure } from "../gen/kvgrpc/v1/common.js";
import { Admission } from "../gen/kvgrpc/v1/handshake.js";
import { LeaseState } from "../gen/kvgrpc/v1/lease.js";
import {
  CancelOutcome,
  MemoryDisposition,
  TransferState,
  type CancelTransferResponse,
  type Transfer,
} from "../gen/kvgrpc/v1/transfer.js";
import type { KvGrpcError, Reason } from "./errors.js";

const REASON_PREFIX = "FAILURE_REASON_";

const TRANSFER_ENDS = new Set([
  TransferState.TRANSFER_STATE_SUCCEEDED,
  TransferState.TRANSFER_STATE_FAILED,
  TransferState.TRANSFER_STATE_CANCELLED,
]);

const LEASE_ENDS = new Set([
  LeaseState.LEASE_STATE_EXPIRED,
  LeaseState.LEASE_STATE_RELEASED,
  LeaseState.LEASE_STATE_DONE,
  LeaseState.LEASE_STATE_VOIDED,
  LeaseState.LEASE_STATE_LOST,
  LeaseState.LEASE_STATE_RECLAIMED,
]);

/** Returns whether a transfer has ended, whatever the outcome. It says nothing about the memory of the transfer. */
export function isOver(transfer: Pick<Transfer, "state">): boolean {
  return TRANSFER_ENDS.has(transfer.state);
}

/** Returns whether a transfer has succeeded: at the destination the KV is in the blocks. */
export function hasSucceeded(transfer: Pick<Transfer, "state">): boolean {
  return transfer.state === TransferState.TRANSFER_STATE_SUCCEEDED;
}

/** Returns the disposition of a transfer's blocks; QUARANTINED where it is unknown. */
export function memoryOf(transfer: Pick<Transfer, "memory"> | undefined): MemoryDisposition {
  switch (transfer?.memory) {
    case MemoryDisposition.MEMORY_DISPOSITION_HELD:
    case MemoryDisposition.MEMORY_DISPOSITION_RETURNED:
      return transfer.memory;
    default:
      return MemoryDisposition.MEMORY_DISPOSITION_QUARANTINED;
  }
}

/** Returns whether the engine's blocks of a transfer may be reused: the transfer is over and they are returned. */
export function mayReuseMemory(transfer: Pick<Transfer, "memory" | "state"> | undefined): boolean {
  if (!transfer || !isOver(transfer)) return false;
  return memoryOf(transfer) === MemoryDisposition.MEMORY_DISPOSITION_RETURNED;
}

/**
 * Returns whether bytes may still be in flight after a cancel. The cancelled transfers state which blocks are returned.
 */
export function mayBeInFlight(cancelled: Pick<CancelTransferResponse, "outcome">): boolean {
  switch (cancelled.outcome) {
    case CancelOutcome.CANCEL_OUTCOME_CANCELLED_BEFORE_ACCESS:
    case CancelOutcome.CANCEL_OUTCOME_ALREADY_ENDED:
    case CancelOutcome.CANCEL_OUTCOME_TOMBSTONED:
      return false;
    default:
      return true;
  }
}

/** Returns whether a lease has ended. */
export function isLeaseOver(lease: { state: LeaseState }): boolean {
  return LEASE_ENDS.has(lease.state);
}

/** Returns whether an engine takes new work. */
export function takesWork(engine: { admission: Admission } | undefined): boolean {
  return engine?.admission === Admission.ADMISSION_OPEN;
}

/** Returns whether the same may be tried again, here or with another engine; `next` says which. */
export function mayRetry(failure: Pick<Failure, "next" | "reason"> | KvGrpcError | undefined): boolean {
  if (!failure || !isKnown(failure.reason)) return false;
  switch (failure.next) {
    case NextStep.NEXT_STEP_RETRY_HERE:
    case NextStep.NEXT_STEP_RETRY_OTHER_CONSUMER:
    case "RETRY_HERE":
    case "RETRY_OTHER_CONSUMER":
      return true;
    default:
      return false;
  }
}

function isKnown(reason: FailureReason | Reason): boolean {
  const name = typeof reason === "string" ? reason : nameOf(FailureReason, REASON_PREFIX, reason);
  return name !== undefined && name !== "UNSPECIFIED" && `${REASON_PREFIX}${name}` in FailureReason;
}

/** Returns the name of a reason as errors have it; an unknown reason reads as INTERNAL. */
export function reasonName(reason: FailureReason): string {
  return nameOf(FailureReason, REASON_PREFIX, reason) ?? "INTERNAL";
}

/**
 * Returns the name of an enum's value without the enum's prefix; undefined for a value that this library does not know.
 */
export function nameOf(values: Record<number, string>, prefix: string, value: number): string | undefined {
  const name = values[value];
  return name?.startsWith(prefix) ? name.slice(prefix.length) : undefined;
}
