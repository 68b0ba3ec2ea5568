import assert from "node:assert/strict";
import { Metadata, status, type Deadline } from "@grpc/grpc-js";
import { test, type TestContext } from "node:test";
import {
  GetEngineResponse,
  KvGrpcError,
  SchedulerServiceService,
  WaitTransferRequest,
  duration,
  type AllocateBlocksRequest,
  type ConnectOptions,
  type ScheduleRequest,
  type ScheduleResponse,
} from "kvgrpc";
import { client, refusal, serve, type Call, type Handlers, type Talking } from "./server.js";

async function start(t: TestContext, handlers: Handlers, options?: ConnectOptions) {
  return client(t, await serve(t, handlers), options);
}

function allocations(failures: status[]) {
  const keys: string[] = [];
  const allocateBlocks = ({ request }: Call<AllocateBlocksRequest>) => {
    keys.push(request.idempotencyKey);
    const code = failures.shift();
    if (code !== undefined) throw refusal(code, "not now");
    return {};
  };
  return { keys, handlers: { pool: { allocateBlocks } } };
}

test("gRPC repeats UNAVAILABLE, under one idempotency key", async (t) => {
  const { keys, handlers } = allocations([status.UNAVAILABLE, status.UNAVAILABLE]);
  const engine = await start(t, handlers);
  await engine.pool.allocateBlocks({ groupBlockCounts: [{ group: 0, blockCount: 1 }] });
  assert.equal(keys.length, 3);
  assert.match(keys[0]!, /^[0-9a-f-]{36}$/);
  assert.deepEqual(new Set(keys).size, 1);
});

test("nothing but UNAVAILABLE is repeated", async (t) => {
  const { keys, handlers } = allocations([status.RESOURCE_EXHAUSTED]);
  const engine = await start(t, handlers);
  await assert.rejects(engine.pool.allocateBlocks({}), { code: status.RESOURCE_EXHAUSTED });
  assert.equal(keys.length, 1);
});

test("a call that an ending server has not begun is repeated twice at most, under one idempotency key", async (t) => {
  const { CANCELLED } = status;
  const { keys, handlers } = allocations([CANCELLED, CANCELLED, CANCELLED, CANCELLED]);
  const engine = await start(t, handlers);
  await assert.rejects(engine.pool.allocateBlocks({}), { code: CANCELLED });
  assert.equal(keys.length, 3);
  await engine.pool.allocateBlocks({});
  assert.equal(keys.length, 5);
  assert.equal(new Set(keys).size, 2);
});

test("a call that a server cancels for a reason, or its caller, is not repeated", async (t) => {
  let calls = 0;
  const allocateBlocks = () => {
    calls++;
    throw refusal(status.CANCELLED, "no", { reason: "CANCELLED" });
  };
  const stopping = new AbortController();
  const getStatus = () => {
    calls++;
    stopping.abort(new Error("enough"));
    return new Promise<never>(() => {});
  };
  const engine = await start(t, { pool: { allocateBlocks }, admin: { getStatus } });
  await assert.rejects(engine.pool.allocateBlocks({}), { code: status.CANCELLED });
  assert.equal(calls, 1);
  await assert.rejects(engine.admin.getStatus({}, { signal: stopping.signal }), { message: "enough" });
  assert.equal(calls, 2);
});

test("each call has an idempotency key of its own, unless the caller states one", async (t) => {
  const { keys, handlers } = allocations([]);
  const engine = await start(t, handlers);
  const request = { groupBlockCounts: [{ group: 0, blockCount: 1 }] };
  await engine.pool.allocateBlocks(request);
  await engine.pool.allocateBlocks(request);
  await engine.pool.allocateBlocks({ ...request, idempotencyKey: "mine" });
  assert.equal(new Set(keys).size, 3);
  assert.equal(keys[2], "mine");
  assert(!("idempotencyKey" in request));
});

test("ConnectPeer is not repeated", async (t) => {
  let calls = 0;
  const connectPeer = () => {
    calls++;
    throw refusal(status.UNAVAILABLE, "the peer cannot be reached");
  };
  const engine = await start(t, { handshake: { connectPeer } });
  await assert.rejects(engine.handshake.connectPeer({ peer: { address: "a:1" } }), { code: status.UNAVAILABLE });
  assert.equal(calls, 1);
});

test("every unary call has a deadline; one that waits has its wait on top", async (t) => {
  const deadlines: number[] = [];
  const note = (call: { getDeadline(): Deadline }) => {
    deadlines.push(Math.round((Number(call.getDeadline()) - Date.now()) / 1000));
    return {};
  };
  const engine = await start(t, {
    admin: { getStatus: note, releaseQuarantine: note },
    handshake: { connectPeer: note },
    scheduler: { pollSchedulerNews: note },
    tensors: { getTensor: note, putTensor: note },
    transfers: { waitTransfer: note, waitTransfers: note },
  });
  await engine.admin.getStatus({});
  await engine.admin.getStatus({}, { timeoutMs: 3_000 });
  await engine.transfers.waitTransfer({ timeout: duration(5_000) });
  await engine.transfers.waitTransfers({});
  await engine.scheduler.pollSchedulerNews({ wait: duration(20_000) });
  await engine.scheduler.pollSchedulerNews({});
  await engine.tensors.getTensor({});
  await engine.tensors.putTensor({});
  await engine.tensors.putTensor({ timeout: duration(5_000) });
  await engine.handshake.connectPeer({});
  await engine.admin.releaseQuarantine({});
  assert.deepEqual(deadlines, [10, 3, 15, 70, 30, 10, 70, 130, 15, 60, 60]);
});

test("a timeout that is no positive number is refused", async (t) => {
  const engine = await start(t, { admin: { getStatus: () => ({}) } });
  await assert.rejects(async () => engine.admin.getStatus({}, { timeoutMs: 0 }), RangeError);
});

test("a call that is late is a typed error", async (t) => {
  const engine = await start(t, { admin: { getStatus: () => new Promise(() => {}) } });
  await assert.rejects(engine.admin.getStatus({}, { timeoutMs: 50 }), (error) => {
    return error instanceof KvGrpcError && error.code === status.DEADLINE_EXCEEDED;
  });
});

test("metadata and trace context go with every call", async (t) => {
  const seen: Metadata[] = [];
  const getStatus = (call: Call<unknown>) => (seen.push(call.metadata), {});
  const parents = ["00-a-b-01", undefined];
  const options = { metadata: { authorization: "Bearer x" }, traceparent: () => parents.shift() };
  const engine = await start(t, { admin: { getStatus } }, options);
  await engine.admin.getStatus({});
  await engine.admin.getStatus({});
  await engine.admin.getStatus({}, { traceparent: "00-c-d-01", metadata: { "x-one": "1" } });
  assert.deepEqual(seen.map((metadata) => metadata.get("traceparent")), [["00-a-b-01"], [], ["00-c-d-01"]]);
  assert.deepEqual(seen.map((metadata) => metadata.get("authorization")[0]), Array(3).fill("Bearer x"));
  assert.deepEqual(seen[2]!.get("x-one"), ["1"]);
});

test("a signal ends a call, which throws the signal's reason", async (t) => {
  const stop = new AbortController();
  const engine = await start(t, { admin: { getStatus: () => (stop.abort(new Error("enough")), new Promise(() => {})) } });
  await assert.rejects(engine.admin.getStatus({}, { signal: stop.signal }), { message: "enough" });
  await assert.rejects(async () => engine.admin.getStatus({}, { signal: stop.signal }), { message: "enough" });
});

test("a request states some fields, the others are unset", async (t) => {
  let seen: object | undefined;
  const pullBlocks = ({ request }: Call<object>) => ((seen = request), {});
  const engine = await start(t, { handoff: { pullBlocks } });
  const blocks = { incarnation: 7, groups: [{ runs: { starts: [3], counts: [2] } }] };
  await engine.handoff.pullBlocks({ grant: { token: new Uint8Array([1]) }, destination: { blocks } });
  const { destination, grant, transferId } = seen as any;
  assert.equal(transferId, undefined);
  assert.deepEqual(destination.blocks.groups[0], { group: 0, runs: { starts: [3], counts: [2] } });
  assert.equal(destination.blocks.allocationId, "");
  assert.deepEqual([...grant.token], [1]);
});

test("a 64-bit number is exact up to 2^53 - 1, and an error beyond, never another number", async (t) => {
  const values = [Number.MAX_SAFE_INTEGER, 2 ** 60];
  const getEngine = () => ({ status: { queuedBytes: values.shift() } });
  const engine = await start(t, { handshake: { getEngine } });
  const reply = await engine.handshake.getEngine({});
  assert.equal(reply.status?.queuedBytes, 9007199254740991);
  await assert.rejects(engine.handshake.getEngine({}), { code: status.INTERNAL });
  const bytes = GetEngineResponse.encode(GetEngineResponse.fromPartial({ header: { incarnation: 2 ** 53 - 1 } })).finish();
  assert.equal(GetEngineResponse.decode(bytes).header?.incarnation, 2 ** 53 - 1);
});

test("an enum value that is unknown arrives as its number", () => {
  const bytes = WaitTransferRequest.encode(WaitTransferRequest.fromPartial({ until: 77 as never })).finish();
  assert.equal(WaitTransferRequest.decode(bytes).until, 77);
});

test("a stream gives its messages, then the error that it ends with", async (t) => {
  const schedule = (call: Talking<ScheduleRequest, ScheduleResponse>) => {
    call.on("data", (request: ScheduleRequest) => {
      if (request.afterSeq < 3) call.write({ header: undefined, answers: [], news: [], more: request.afterSeq === 1 });
      else call.emit("error", refusal(status.ABORTED, "over", { reason: "INCARNATION_CHANGED" }));
    });
  };
  const engine = await start(t, { scheduler: { schedule } });
  const stream = engine.stream(SchedulerServiceService.schedule);
  await stream.send({ calls: [], afterSeq: 1, incarnation: 0 });
  await stream.send({ calls: [], afterSeq: 2, incarnation: 0 });
  assert.equal((await stream.next())?.more, true);
  assert.equal((await stream.next())?.more, false);
  await stream.send({ calls: [], afterSeq: 3, incarnation: 0 });
  await assert.rejects(stream.next(), { reason: "INCARNATION_CHANGED" });
});

test("a stream that the server completes ends without an error", async (t) => {
  const schedule = (call: Talking<ScheduleRequest, ScheduleResponse>) => call.on("end", () => call.end()).resume();
  const engine = await start(t, { scheduler: { schedule } });
  const stream = engine.stream(SchedulerServiceService.schedule);
  stream.finish();
  assert.equal(await stream.next(), undefined);
});

test("a client that is closed makes no calls", async (t) => {
  const engine = await start(t, { admin: { getStatus: () => ({}) } });
  engine.close();
  await assert.rejects(engine.admin.getStatus({}), /closed/);
});
