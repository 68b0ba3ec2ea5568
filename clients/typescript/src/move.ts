// Pulls and pushes that wait for their end, and one call that moves the KV of a prompt. A transfer that ends without
// its KV is an error here. At the server it is not an error of a call.

import { randomBytes } from "node:crypto";
import { status } from "@grpc/grpc-js";
import { FailureReason, NextStep, TransferPhase, type Blocks, type Content } from "../gen/kvgrpc/v1/common.js";
import type { PullBlocksRequest, ReserveBlocksRequest } from "../gen/kvgrpc/v1/handoff.js";
import { WaitCondition, WaitingFor, type Transfer, type TransferWait } from "../gen/kvgrpc/v1/transfer.js";
import type { CallOptions } from "./caller.js";
import { cleanUp } from "./clean-up.js";
import type { Client } from "./client.js";
import { duration } from "./durations.js";
import { hasSucceeded, isOver, nameOf, reasonName } from "./enums.js";
import { KvGrpcError } from "./errors.js";
import type { Partially } from "./services.js";

/**
 * Wait of one call in milliseconds: half of what a server allows, so that proxies with a limit of one minute let it
 * pass.
 */
const ONE_WAIT_MS = 30_000;
/** Default time of a move in milliseconds. It exceeds the sum of a server's defaults for queue, transfer and settle. */
const DEFAULT_MS = 90_000;

export interface EndOptions extends Omit<CallOptions, "timeoutMs"> {
  /** Time in milliseconds up to the end of the transfer; 90,000 by default. */
  timeoutMs?: number;
}

export interface MoveOptions extends EndOptions {
  /** Label of the transfer at both engines. */
  requestId?: string;
  /** Destination blocks. Unset: as many blocks are allocated at the destination as the source has, group by group. */
  into?: Blocks;
}

/** The result of a move. */
export interface Moved {
  /** The RECEIVE at the destination. */
  transfer: Transfer;
  /** The destination's blocks. Blocks that the move allocated are freed by their allocation id. */
  blocks: Blocks;
}

/**
 * Returns the transfer, which has succeeded or is not over. A transfer that has ended without its KV throws a
 * KvGrpcError. The code of the error is ABORTED, its reason and next step are those of the failure, and its metadata
 * has `transfer_id` and `phase`.
 */
export function checkTransfer(transfer: Transfer): Transfer {
  if (!isOver(transfer) || hasSucceeded(transfer)) return transfer;
  const { failure } = transfer;
  const reason = failure?.reason ?? FailureReason.FAILURE_REASON_UNSPECIFIED;
  const stated = reason !== FailureReason.FAILURE_REASON_UNSPECIFIED;
  throw new KvGrpcError(status.ABORTED, failure?.message || "the transfer has ended without its KV", {
    reason: stated ? reasonName(reason) : "CANCELLED",
    next: (stated && reason in FailureReason && nameOf(NextStep, "NEXT_STEP_", failure!.next)) || "UNSPECIFIED",
    metadata: { transfer_id: transfer.transferId, phase: phaseName(failure?.phase) },
  });
}

/** Makes a pull whose destination is stated, and waits for its end; see Client.pull. */
export function pull(client: Client, request: Partially<PullBlocksRequest>, options?: EndOptions): Promise<Transfer> {
  return ended(client, request.wait, options, (wait, call) => client.handoff.pullBlocks({ ...request, wait }, call));
}

/** Reserves blocks for what the request's source will push, and waits for it as pull does. */
export function receive(
  client: Client,
  request: Partially<ReserveBlocksRequest>,
  options?: EndOptions,
): Promise<Transfer> {
  return ended(client, request.wait, options, (wait, call) => client.handoff.reserveBlocks({ ...request, wait }, call));
}

/**
 * Copies the KV of a prompt from blocks of one engine to another engine, and waits until the KV is there. It allocates
 * blocks at the destination, hands the source's blocks over for reading, and lets the destination pull. Both servers
 * must manage their pools. The caller keeps the source's blocks.
 *
 * A move that fails leaves nothing behind: it is cancelled at both sides, and what it allocated is freed.
 */
export async function move(
  source: Client,
  destination: Client,
  blocks: Blocks,
  content: Content,
  options: MoveOptions = {},
): Promise<Moved> {
  const { requestId = "", timeoutMs = DEFAULT_MS, into: given, ...call } = options;
  const end = performance.now() + timeoutMs;
  const transferKey = new Uint8Array(randomBytes(16));
  const wanted = { groupBlockCounts: counts(blocks), requestId, label: "move" };
  const taken = given ?? (await destination.pool.allocateBlocks(wanted, call)).blocks!;
  try {
    const forReaders = { blocks, content, ttl: duration(timeoutMs) };
    const { grant } = await source.handoff.finishedBlocks({ transferKey, requestId, forReaders }, call);
    const asked = { grant, content, destination: { blocks: taken }, requestId };
    const left = Math.max(end - performance.now(), 1);
    return { transfer: await pull(destination, asked, { ...call, timeoutMs: left }), blocks: taken };
  } catch (error) {
    const freeAllocationIds = given ? [] : [taken.allocationId];
    const sides = [{ client: source, transferKey }, { client: destination, transferKey, freeAllocationIds }];
    await cleanUp(sides, { message: "the move failed" });
    throw error;
  }
}

interface Begun {
  transfer?: Transfer | undefined;
  conditionMet: boolean;
}

async function ended(
  client: Client,
  stated: Partially<TransferWait> | undefined,
  options: EndOptions = {},
  begin: (wait: Partially<TransferWait>, call: CallOptions) => Promise<Begun>,
): Promise<Transfer> {
  const { timeoutMs = DEFAULT_MS, ...call } = options;
  const end = performance.now() + timeoutMs;
  const until = stated?.until ?? WaitCondition.WAIT_CONDITION_ENDED;
  let { transfer, conditionMet } = await begin({ until, timeout: duration(Math.min(timeoutMs, ONE_WAIT_MS)) }, call);
  if (!conditionMet) {
    const left = Math.max(end - performance.now(), 1);
    ({ transfer, conditionMet } = await client.wait(transfer!.transferId, { ...call, until, timeoutMs: left }));
  }
  if (!conditionMet) {
    throw new KvGrpcError(status.DEADLINE_EXCEEDED, "the transfer is not done in its time", {
      reason: "DEADLINE",
      metadata: { transfer_id: transfer!.transferId, phase: isOver(transfer!) ? "return" : waitsFor(transfer!) },
    });
  }
  return checkTransfer(transfer!);
}

/** Returns what a transfer that is not over waits for, or its phase. */
function waitsFor(transfer: Transfer): string {
  const waiting = nameOf(WaitingFor, "WAITING_FOR_", transfer.waitingFor);
  if (waiting && waiting !== "UNSPECIFIED") return waiting.toLowerCase();
  return phaseName(transfer.phases.at(-1)?.phase) || "queue";
}

function phaseName(phase: TransferPhase | undefined): string {
  const name = phase && nameOf(TransferPhase, "TRANSFER_PHASE_", phase);
  return name ? name.toLowerCase() : "";
}

function counts(blocks: Blocks): { group: number; blockCount: number }[] {
  return blocks.groups.map(({ group, runs }) => ({
    group,
    blockCount: (runs?.counts ?? []).reduce((sum, count) => sum + count, 0),
  }));
}
