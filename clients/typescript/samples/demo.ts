// A scheduler and router in one: it drives one pull between two kvgrpc servers.
//
//     kvgrpc serve --port 50051 &
//     kvgrpc serve --port 50052 &
//     npm run demo -- --prefill 127.0.0.1:50051 --decode 127.0.0.1:50052

import { randomBytes } from "node:crypto";
import { parseArgs } from "node:util";
import {
  KvGrpcError,
  MemoryDisposition,
  TransferState,
  WaitCondition,
  cleanUp,
  connect,
  hasSucceeded,
  isOver,
  mayReuseMemory,
  milliseconds,
  reasonName,
  type Blocks,
  type Client,
  type PullBlocksResponse,
  type Transfer,
} from "kvgrpc";

const { values: flags } = parseArgs({
  options: {
    prefill: { type: "string", default: "127.0.0.1:50051" },
    decode: { type: "string", default: "127.0.0.1:50052" },
    blocks: { type: "string", default: "32" },
    traceparent: { type: "string", default: `00-${hex(16)}-${hex(8)}-01` },
    timeout: { type: "string", default: "120" },
  },
});

/** Runs one request as its router sees it. */
async function run(prefill: Client, decode: Client, blockCount: number, signal: AbortSignal): Promise<void> {
  const blockTokens = await pair(prefill, decode);
  const transferKey = randomBytes(16);
  const content = { tokens: { tokenIds: prompt(blockCount * blockTokens) } };
  const groupBlockCounts = [{ group: 0, blockCount }];

  // P holds the prompt's KV in these blocks, and D receives it into its own.
  const source = await prefill.pool.allocateBlocks({ groupBlockCounts });
  const destination = await decode.pool.allocateBlocks({ groupBlockCounts });
  const sides = [
    { client: prefill, transferKey, freeAllocationIds: [source.blocks!.allocationId] },
    { client: decode, transferKey, freeAllocationIds: [destination.blocks!.allocationId] },
  ];
  try {
    // P has computed the prompt. Its blocks are pinned under a lease, and P mints the grant to read them.
    const handedOver = await prefill.handoff.finishedBlocks({
      transferKey,
      requestId: "demo",
      forReaders: { blocks: source.blocks, content },
    });
    console.log(`finished  ${handedOver.lease!.leaseId}, a grant of ${handedOver.grant!.token.length} bytes`);
    await whoPinsWhat(prefill, decode);

    // The router relays the grant unread. D pulls with it and states the tokens.
    const pull = await decode.handoff.pullBlocks({
      transferKey,
      requestId: "demo",
      grant: handedOver.grant,
      content,
      destination: { blocks: destination.blocks },
    });
    const received = await follow(decode, pull, signal);
    report(received);
    if (!hasSucceeded(received)) throw new Error(`the pull ended as ${TransferState[received.state]}`);

    // D has told P that its consumer is done. The wait covers the last message between them.
    const until = WaitCondition.WAIT_CONDITION_RETURNED;
    await prefill.wait(handedOver.transfer!.transferId, { until, timeoutMs: 5_000, signal });
  } catch (error) {
    // Whatever went wrong, no side keeps blocks or a transfer for a request that is given up.
    for (const side of await cleanUp(sides, { message: "the demo failed" })) {
      console.log(`cleaned   ${side.error ? explain(side.error) : `outcome ${side.outcome}`}`);
    }
    throw error;
  }
  await free(prefill, source.blocks!);
  await free(decode, destination.blocks!);
  await whoPinsWhat(prefill, decode);
}

/**
 * Checks that the two can exchange blocks and lets them connect, so that the first transfer need not wait for that.
 * Returns the number of tokens in a block.
 */
async function pair(prefill: Client, decode: Client): Promise<number> {
  const [source, destination] = await Promise.all([
    prefill.handshake.getCapabilities({}),
    decode.handshake.getCapabilities({}),
  ]);
  const verdict = await prefill.handshake.checkCompatibility({ engine: destination.engine });
  if (!verdict.compatible) {
    throw new Error(`these engines cannot exchange blocks: ${JSON.stringify(verdict.differences)}`);
  }
  const { address, engineId } = source.engine!;
  const connected = await decode.handshake.connectPeer({ peer: { address, engineId } });
  for (const path of connected.peer!.paths) {
    console.log(`paired    rank ${path.rank} reads rank ${path.peerRank}: ${path.why}`);
  }
  return source.engine!.pool!.groups[0]!.blockTokens;
}

/** Watches a transfer until it is over and its blocks are returned. */
async function follow(client: Client, pull: PullBlocksResponse, signal: AbortSignal): Promise<Transfer> {
  const { transferId } = pull.transfer!;
  const filter = { transferIds: [transferId] };
  if (isOver(pull.transfer!) && mayReuseMemory(pull.transfer)) return pull.transfer!;
  for await (const change of client.watch({ filter, after: pull.header, signal })) {
    // Changes are missing. One look at the transfer replaces all of them.
    const transfer = change.transfer ?? (await client.transfers.getTransfer({ transferId })).transfer!;
    const { [transfer.state]: state } = TransferState;
    const { [transfer.memory]: memory } = MemoryDisposition;
    console.log(`change    ${transfer.eventSeq}: ${state}, ${memory}`);
    if (isOver(transfer) && mayReuseMemory(transfer)) return transfer;
  }
  throw new Error("a watch has no end of its own");
}

/** Prints what an operator wants to know of a transfer that is over. */
function report(transfer: Transfer): void {
  const age = milliseconds(transfer.age).toFixed(1);
  console.log(
    `transfer  ${transfer.transferId} ${TransferState[transfer.state]}: ${transfer.blockCount} blocks, ` +
      `${transfer.movedBytes} bytes, ${transfer.useTokens} tokens in ${age} ms`,
  );
  for (const path of transfer.paths) {
    console.log(`  path    rank ${path.rank} from rank ${path.peerRank}: ${path.movedBytes} bytes, ${path.why}`);
  }
  if (transfer.failure) console.log(`  failure ${reasonName(transfer.failure.reason)}: ${transfer.failure.message}`);
}

/** Prints the first page of pins and leases of each engine. */
async function whoPinsWhat(...clients: Client[]): Promise<void> {
  for (const client of clients) {
    const [{ header, pins }, { leases }] = await Promise.all([
      client.admin.listPins({}),
      client.leases.listLeases({}),
    ]);
    console.log(`pins      ${header!.engineId}: ${pins.length} pins, ${leases.length} leases`);
    for (const pin of pins) console.log(`  pin     ${countOf(pin.blocks)} blocks by ${pin.owner} for ${pin.requestId}`);
  }
}

/** Gives blocks back. Pinned blocks become free at their last unpin. */
async function free(client: Client, blocks: Blocks): Promise<void> {
  const { header, freedBlocks } = await client.pool.freeBlocks({ blocks });
  console.log(`freed     ${countOf(freedBlocks)} blocks of ${header!.engineId}`);
}

function countOf(blocks: Blocks | undefined): number {
  return (blocks?.groups ?? []).flatMap((group) => group.runs?.counts ?? []).reduce((sum, count) => sum + count, 0);
}

/** Makes up token ids. */
function prompt(tokens: number): number[] {
  return Array.from({ length: tokens }, (_, i) => i % 32_000);
}

function hex(bytes: number): string {
  return randomBytes(bytes).toString("hex");
}

/** Adds the reason, which is for programs, to the message, which is for readers. */
function explain(error: unknown): string {
  if (error instanceof KvGrpcError) return `${error.message} [${error.codeName} ${error.reason}, next ${error.next}]`;
  return error instanceof Error ? error.message : String(error);
}

// Every call carries the trace context, so that the spans of both servers join the request's trace.
console.log(`trace     ${flags.traceparent}`);
const options = { traceparent: flags.traceparent };
const prefill = connect(flags.prefill, options);
const decode = connect(flags.decode, options);
try {
  await run(prefill, decode, Number(flags.blocks), AbortSignal.timeout(Number(flags.timeout) * 1000));
} catch (error) {
  console.error(`demo: ${explain(error)}`);
  process.exitCode = 1;
} finally {
  prefill.close();
  decode.close();
}
