// Cleans up at both sides what a failed request leaves behind.

import { status } from "@grpc/grpc-js";
import { CancelOutcome, type CancelTransferResponse, type Transfer } from "../gen/kvgrpc/v1/transfer.js";
import type { CallOptions } from "./caller.js";
import type { Client } from "./client.js";
import { KvGrpcError } from "./errors.js";

/** One engine of a request, and what the request had there. */
export interface Side {
  client: Client;
  /** Ends all transfers of the request, later ones included. It is an alternative to `transferId`. */
  transferKey?: Uint8Array;
  /** Ends one transfer. */
  transferId?: string;
  /** Allocations to free as well. Pinned blocks become free at their last unpin. */
  freeAllocationIds?: string[];
}

export interface CleanUpOptions extends CallOptions {
  /** Text for logs and for the transfer's failure message. */
  message?: string;
}

/** Result of one side, in the order of the sides: its outcome, or its error. */
export type CleanedSide =
  | { outcome: CancelOutcome; transfers: Transfer[]; error?: undefined }
  | { outcome?: undefined; transfers: Transfer[]; error: KvGrpcError };

/**
 * Cancels and frees at all sides in parallel. Neither a side that fails nor one whose client is closed stops the
 * others. It throws only where `signal` aborts, once every side has been told or given up.
 */
export async function cleanUp(sides: readonly Side[], options: CleanUpOptions = {}): Promise<CleanedSide[]> {
  const told = await Promise.allSettled(sides.map((side) => cleanUpSide(side, options)));
  return told.map((one) => {
    if (one.status === "rejected") throw one.reason;
    return one.value;
  });
}

async function cleanUpSide(side: Side, { message, ...call }: CleanUpOptions): Promise<CleanedSide> {
  const { client, transferKey, transferId, freeAllocationIds } = side;
  const target = transferKey ? { transferKey } : { transferId };
  let reply: CancelTransferResponse;
  try {
    reply = await client.transfers.cancelTransfer({ ...target, message, freeAllocationIds }, call);
  } catch (error) {
    if (call.signal?.aborted) throw error;
    return { transfers: [], error: asTyped(error) };
  }
  return { outcome: reply.outcome, transfers: reply.transfers };
}

/** Returns a typed error, even where no call could be made: a closed client throws an error of its own. */
function asTyped(error: unknown): KvGrpcError {
  if (error instanceof KvGrpcError) return error;
  const text = error instanceof Error ? error.message : String(error);
  return new KvGrpcError(status.CANCELLED, text, {}, { cause: error });
}
