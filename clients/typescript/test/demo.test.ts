import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { text } from "node:stream/consumers";
import { test, type TestContext } from "node:test";
import {
  MemoryDisposition,
  TransferState,
  WatchTransfersResponse,
  type CancelTransferRequest,
  type FinishedBlocksRequest,
  type FreeBlocksRequest,
  type PullBlocksRequest,
  type WatchTransfersRequest,
} from "kvgrpc";
import { serve, type Call, type Writing } from "./server.js";

/** Plays as much of an engine as the sample sees. `end` is how a transfer ends. */
async function engine(t: TestContext, engineId: string, end: TransferState) {
  const seen: Record<string, any> = {};
  const header = { engineId, incarnation: 7, eventSeq: 1 };
  const blocks = { incarnation: 7, allocationId: `a-${engineId}`, groups: [{ runs: { starts: [0], counts: [4] } }] };
  const transfer = { transferId: `t-${engineId}`, state: TransferState.TRANSFER_STATE_PENDING };
  const over = { ...transfer, state: end, memory: MemoryDisposition.MEMORY_DISPOSITION_RETURNED };
  const server = await serve(t, {
    admin: { listPins: () => ({ header, pins: [{ owner: "lease", blocks }] }) },
    handshake: {
      getCapabilities: () => ({ header, engine: { engineId, address: "p:1", pool: { groups: [{ blockTokens: 16 }] } } }),
      checkCompatibility: () => ({ compatible: true }),
      connectPeer: () => ({ peer: { paths: [{ why: "shared memory" }] } }),
    },
    handoff: {
      finishedBlocks: ({ request }: Call<FinishedBlocksRequest>) => {
        seen.finished = request;
        return { header, lease: { leaseId: "l" }, transfer, grant: { token: new Uint8Array(3) } };
      },
      pullBlocks: ({ request }: Call<PullBlocksRequest>) => ((seen.pulled = request), { header, transfer }),
    },
    leases: { listLeases: () => ({ header }) },
    pool: {
      allocateBlocks: () => ({ header, blocks }),
      freeBlocks: ({ request }: Call<FreeBlocksRequest>) => ((seen.freed = request.blocks), { header, freedBlocks: blocks }),
    },
    transfers: {
      cancelTransfer: ({ request }: Call<CancelTransferRequest>) => ((seen.cancelled = request), { header }),
      waitTransfer: () => ({ transfer: over, conditionMet: true }),
      watchTransfers: (call: Writing<WatchTransfersRequest, WatchTransfersResponse>) => {
        seen.watched = call.request;
        call.write(WatchTransfersResponse.fromPartial({ header: { ...header, eventSeq: 2 }, transfer: over }));
      },
    },
  });
  return { seen, address: server.address };
}

async function run(prefill: string, decode: string) {
  const flags = ["--prefill", prefill, "--decode", decode, "--blocks", "4", "--timeout", "20"];
  const child = spawn(process.execPath, ["build/samples/demo.js", ...flags]);
  const [out, err, [code]] = await Promise.all([text(child.stdout), text(child.stderr), once(child, "exit")]);
  return { out, err, code };
}

test("the sample drives a pull to its end and gives the blocks back", async (t) => {
  const p = await engine(t, "P", TransferState.TRANSFER_STATE_SUCCEEDED);
  const d = await engine(t, "D", TransferState.TRANSFER_STATE_SUCCEEDED);
  const { out, err, code } = await run(p.address, d.address);
  assert.equal(code, 0, err);
  assert.match(out, /transfer {2}t-D TRANSFER_STATE_SUCCEEDED/);
  assert.equal(p.seen.finished.forReaders.content.tokens.tokenIds.length, 64);
  assert.deepEqual(d.seen.pulled.content, p.seen.finished.forReaders.content);
  assert.deepEqual(d.seen.pulled.transferKey, p.seen.finished.transferKey);
  assert.equal(d.seen.pulled.destination.blocks.allocationId, "a-D");
  assert.deepEqual([d.seen.watched.afterEventSeq, d.seen.watched.incarnation], [1, 7]);
  assert.deepEqual([p.seen.freed.allocationId, d.seen.freed.allocationId], ["a-P", "a-D"]);
});

test("the sample cleans up at both sides when the pull fails", async (t) => {
  const p = await engine(t, "P", TransferState.TRANSFER_STATE_SUCCEEDED);
  const d = await engine(t, "D", TransferState.TRANSFER_STATE_FAILED);
  const { err, code } = await run(p.address, d.address);
  assert.equal(code, 1);
  assert.match(err, /TRANSFER_STATE_FAILED/);
  for (const [side, allocation] of [[p, "a-P"], [d, "a-D"]] as const) {
    assert.deepEqual(side.seen.cancelled.freeAllocationIds, [allocation]);
    assert.deepEqual(side.seen.cancelled.transferKey, p.seen.finished.transferKey);
  }
});
