import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { status } from "@grpc/grpc-js";
import { test, type TestContext } from "node:test";
import {
  CancelOutcome,
  FailureReason,
  KeepAliveResponse,
  LeaseState,
  TransferState,
  WatchEngineResponse,
  WatchTransfersResponse,
  duration,
  type AllocateBlocksRequest,
  type GetLeaseRequest,
  type KeepAliveRequest,
} from "kvgrpc";
import { refusal, serve, type Call, type Handlers, type Talking, type Writing } from "./server.js";

type Json = Record<string, any>;

class Executor {
  private readonly child = spawn(process.execPath, ["build/conformance/executor.js"]);
  private readonly waiting = new Map<number, (answer: Json) => void>();
  private count = 0;

  constructor() {
    this.child.stderr.pipe(process.stderr);
    createInterface({ input: this.child.stdout }).on("line", (line) => {
      const { id, ...answer } = JSON.parse(line) as Json;
      this.waiting.get(id)!(answer);
    });
  }

  do(op: string, fields: Json = {}): Promise<Json> {
    const id = ++this.count;
    this.child.stdin.write(`${JSON.stringify({ id, op, ...fields })}\n`);
    return new Promise((resolve) => this.waiting.set(id, resolve));
  }

  async ok(op: string, fields: Json = {}): Promise<Json> {
    const answer = await this.do(op, fields);
    assert.equal(answer.error, undefined, JSON.stringify(answer.error));
    return answer.ok as Json;
  }

  async end(): Promise<number> {
    this.child.stdin.end();
    const [code] = (await once(this.child, "exit")) as [number];
    return code;
  }
}

async function start(t: TestContext, handlers: Handlers): Promise<Executor> {
  const server = await serve(t, handlers);
  const executor = new Executor();
  t.after(() => executor.end());
  await executor.ok("connect", { server: "P", address: server.address });
  return executor;
}

test("the executor says hello and ends with its input", async () => {
  const executor = new Executor();
  assert.deepEqual(await executor.ok("hello"), { language: "typescript", version: process.versions.node });
  assert.equal((await executor.do("nothing")).error.code, "EXECUTOR");
  assert.equal((await executor.do("call", { server: "X", method: "kvgrpc.v1.PoolService/Nothing" })).error.code, "EXECUTOR");
  assert.equal(await executor.end(), 0);
});

test("messages are in Protobuf's JSON mapping both ways", async (t) => {
  let seen: AllocateBlocksRequest | undefined;
  const header = { engineId: "P", incarnation: 2 ** 53 - 1, eventSeq: 3 };
  const executor = await start(t, {
    pool: {
      allocateBlocks: (call: Call<AllocateBlocksRequest>) => {
        seen = call.request;
        return { header, remaining: duration(2_500) };
      },
    },
    leases: {
      getLease: () => ({
        lease: { leaseId: "l", state: 77 as never, ttl: duration(30_000), labels: { incarnation: "x" }, tokenCount: 5 },
      }),
    },
    transfers: {
      getTransfer: () => ({ transfer: { movedBytes: 5, failure: { reason: 4711 as never, rank: 0 } } }),
    },
  });
  const method = "kvgrpc.v1.PoolService/AllocateBlocks";
  const request = { groupBlockCounts: [{ group: 0, blockCount: 8 }], ttl: "1.500s" };
  const { reply } = await executor.ok("call", { server: "P", method, request });
  assert.deepEqual(reply, {
    header: { engineId: "P", incarnation: "9007199254740991", eventSeq: "3" },
    remaining: "2.500s",
  });
  assert.deepEqual(seen!.ttl, { seconds: 1, nanos: 500_000_000 });
  assert.notEqual(seen!.idempotencyKey, "");
  const lease = await executor.ok("call", { server: "P", method: "kvgrpc.v1.LeaseService/GetLease", request: {} });
  assert.deepEqual(lease.reply.lease, {
    leaseId: "l",
    state: 77,
    ttl: "30s",
    labels: { incarnation: "x" },
    tokenCount: 5,
  });
  const transfer = await executor.ok("call", { server: "P", method: "kvgrpc.v1.TransferService/GetTransfer" });
  assert.deepEqual(transfer.reply.transfer, { movedBytes: "5", failure: { reason: 4711, rank: 0 } });
});

test("an error holds what the typed error holds", async (t) => {
  const executor = await start(t, {
    leases: {
      getLease: ({ request }: Call<GetLeaseRequest>) => {
        throw refusal(status.NOT_FOUND, `no lease ${request.lease?.leaseId}`, {
          reason: "LEASE_NOT_FOUND",
          metadata: { next: "RECOMPUTE", engine_id: "P", incarnation: "1234" },
          violations: [{ field: "lease", description: "unknown" }],
          retryDelay: duration(500),
        });
      },
    },
  });
  const method = "kvgrpc.v1.LeaseService/GetLease";
  const { error } = await executor.do("call", { server: "P", method, request: { lease: { leaseId: "l" } } });
  assert.deepEqual(error, {
    code: "NOT_FOUND",
    reason: "LEASE_NOT_FOUND",
    message: "no lease l",
    next: "RECOMPUTE",
    engineId: "P",
    incarnation: "1234",
    metadata: { next: "RECOMPUTE", engine_id: "P", incarnation: "1234" },
    violations: [{ field: "lease", description: "unknown" }],
    retryDelayS: 0.5,
  });
});

test("streams are opened, written, read and finished", async (t) => {
  const keepAlive = (call: Talking<KeepAliveRequest, KeepAliveResponse>) => {
    call.sendMetadata(call.metadata);
    call.on("data", ({ leases }: KeepAliveRequest) => {
      call.write(KeepAliveResponse.fromPartial({ leases: leases.map(() => ({ remaining: duration(1_000) })) }));
    });
    call.on("end", () => call.end());
  };
  const executor = await start(t, { leases: { keepAlive } });
  const method = "kvgrpc.v1.LeaseService/KeepAlive";
  const opened = await executor.ok("open", { server: "P", method, stream: "s", metadata: { "x-test": "1" } });
  assert.equal(opened.metadata["x-test"], "1");
  assert.deepEqual(await executor.ok("next", { stream: "s", timeoutS: 0.01 }), { timeout: true });
  await executor.ok("send", { stream: "s", request: { leases: [{ leaseId: "a" }] } });
  const next = { stream: "s", timeoutS: 5 };
  assert.deepEqual(await executor.ok("next", next), { message: { leases: [{ remaining: "1s" }] } });
  await executor.ok("finish", { stream: "s" });
  assert.deepEqual(await executor.ok("next", next), { end: true });
  await executor.ok("open", { server: "P", method, stream: "c" });
  await executor.ok("cancel", { stream: "c" });
  assert.equal((await executor.do("next", { stream: "c", timeoutS: 5 })).error.code, "CANCELLED");
});

test("waits, watches, renewals and clean-ups are the wrapper's", async (t) => {
  const header = { engineId: "P", incarnation: 7, eventSeq: 2 };
  const transfer = { transferId: "t", state: TransferState.TRANSFER_STATE_SUCCEEDED };
  const executor = await start(t, {
    transfers: {
      waitTransfer: () => ({ transfer, conditionMet: true }),
      watchTransfers: (call: Writing<any, WatchTransfersResponse>) => {
        call.write(WatchTransfersResponse.fromPartial({ header, transfer }));
      },
      cancelTransfer: ({ request }: Call<{ transferId?: string }>) => {
        if (request.transferId) throw refusal(status.NOT_FOUND, "gone", { reason: "TRANSFER_NOT_FOUND" });
        return { outcome: CancelOutcome.CANCEL_OUTCOME_TOMBSTONED };
      },
    },
    handshake: {
      watchEngine: (call: Writing<any, WatchEngineResponse>) => {
        call.write(WatchEngineResponse.fromPartial({ header, status: { leaseCount: 3, queuedBytes: 4 } }));
      },
    },
    leases: {
      keepAlive: (call: Talking<KeepAliveRequest, KeepAliveResponse>) => {
        const reason = FailureReason.FAILURE_REASON_LEASE_VOIDED;
        const voided = { state: LeaseState.LEASE_STATE_VOIDED, reason };
        const live = { state: LeaseState.LEASE_STATE_LIVE, remaining: duration(60_000) };
        call.on("data", () => call.write(KeepAliveResponse.fromPartial({ leases: [voided, live] })));
      },
    },
  });
  const server = "P";
  const json = { transferId: "t", state: "TRANSFER_STATE_SUCCEEDED" };
  const waited = await executor.ok("wait", { server, transferId: "t", until: "ENDED", timeoutS: 5 });
  assert.deepEqual(waited, { transfer: json, conditionMet: true });

  const after = { eventSeq: "1", incarnation: "7" };
  await executor.ok("watch", { server, stream: "w", filter: { requestId: "r" }, after });
  const { message } = await executor.ok("next", { stream: "w", timeoutS: 5 });
  assert.deepEqual(message, { header: { engineId: "P", incarnation: "7", eventSeq: "2" }, transfer: json });
  await executor.ok("cancel", { stream: "w" });
  assert.equal((await executor.do("next", { stream: "w", timeoutS: 5 })).error.code, "CANCELLED");

  await executor.ok("watchEngine", { server, stream: "e" });
  const engine = await executor.ok("next", { stream: "e", timeoutS: 5 });
  assert.deepEqual(engine.message.status, { leaseCount: 3, queuedBytes: "4" });

  await executor.ok("keepAlive", { server, keeper: "k", leases: [{ leaseId: "a" }, { leaseId: "b" }], ttlS: 60 });
  assert.deepEqual(await executor.ok("kept", { keeper: "k", index: 0, timeoutS: 5 }), { state: "VOIDED" });
  assert.deepEqual(await executor.ok("kept", { keeper: "k", index: 1, timeoutS: 0.01 }), { state: "LIVE" });
  await executor.ok("stopKeeping", { keeper: "k" });

  const sides = [{ server, transferKey: "AAAAAAAAAAAAAAAAAAAAAA==", freeAllocationIds: ["a"] }, { server, transferId: "t" }];
  const cleaned = await executor.ok("cleanUp", { sides, message: "over" });
  assert.deepEqual(cleaned, { outcomes: ["TOMBSTONED", "TRANSFER_NOT_FOUND"] });

  await executor.ok("close", { server });
  await executor.ok("close", { server });
  assert.match((await executor.do("next", { stream: "e" })).error.message, /no stream e/);
});
