// What a failed request leaves behind, cleaned up at both sides.

import { status } from "@grpc/grpc-js";
import { CancelOutcome, type CancelTransferResponse, type Transfer } from "../gen/kvgrpc/v1/transfer.js";
import type { CallOptions } from "./caller.js";
import type { Client } from "./client.js";
import { KvGrpcError } from "./errors.js";

/** One engine of a request, and what the request had there. */
export interface Side {
  client: Client;
  /** All transfers of the request, those still to come included. Or: */
  transferKey?: Uint8Array;
  /** one of them. */
  transferId?: string;
  /** Freed as well; pinned blocks follow at their last unpin. */
  freeAllocationIds?: string[];
}

export interface CleanUpOptions extends CallOptions {
  /** For logs and the transfer's failure message. */
  message?: string;
}

/** What one side said, in the order of the sides: its outcome, or the error that it failed with. */
export type CleanedSide =
  | { outcome: CancelOutcome; transfers: Transfer[]; error?: undefined }
  | { outcome?: undefined; transfers: Transfer[]; error: KvGrpcError };

/**
 * Cancels and frees at all sides at once. A side that fails does not keep another from being told, nor does one whose
 * client is closed. It throws only where `signal` aborts, once all sides have been told or given up.
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

/** Also where no call could be made: a client that is closed throws an error of its own. */
function asTyped(error: unknown): KvGrpcError {
  if (error instanceof KvGrpcError) return error;
  const text = error instanceof Error ? error.message : String(error);
  return new KvGrpcError(status.CANCELLED, text, {}, { cause: error });
}
