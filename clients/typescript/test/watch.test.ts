import assert from "node:assert/strict";
import { status } from "@grpc/grpc-js";
import { test, type TestContext } from "node:test";
import { TransferState, type WatchTransfersRequest, type WatchTransfersResponse } from "kvgrpc";
import { Inbox, client, fail, serve, type Writing } from "./server.js";

type Watching = Writing<WatchTransfersRequest, WatchTransfersResponse>;

const message = (eventSeq: number, rest: object = {}, incarnation = 7): any => ({
  header: { engineId: "P", incarnation, eventSeq },
  ...rest,
});
const change = (eventSeq: number, incarnation = 7) =>
  message(eventSeq, { transfer: { transferId: `t${eventSeq}`, state: TransferState.TRANSFER_STATE_PENDING } }, incarnation);

/** Plays each stream of the watch by the next of `plays`. The last stream stays open. */
async function start(t: TestContext, ...plays: ((call: Watching) => void)[]) {
  const requests: WatchTransfersRequest[] = [];
  const cancelled = new Inbox<true>();
  const watchTransfers = (call: Watching) => {
    requests.push(call.request);
    call.on("cancelled", () => cancelled.put(true));
    const write = call.write.bind(call);
    call.write = ((value: object) => write(complete(value))) as typeof call.write;
    plays.shift()?.(call);
  };
  const server = await serve(t, { transfers: { watchTransfers } });
  return { requests, cancelled, server, engine: client(t, server) };
}

function complete(value: any): WatchTransfersResponse {
  const lists = { layersDone: [], phases: [], paths: [] };
  const texts = { requestId: "", traceId: "", leaseId: "", pairId: "" };
  const numbers = { direction: 0, memory: 0, waitingFor: 0, useTokens: 0, blockCount: 0, totalBytes: 0, movedBytes: 0 };
  const rest = { doneConsumerCount: 0, consumerCount: 0, priority: 0, eventSeq: 0, partEpoch: 0 };
  const transfer = value.transfer && { ...lists, ...texts, ...numbers, ...rest, ...value.transfer };
  return { historyLost: false, ...value, transfer };
}

async function take(messages: AsyncIterable<WatchTransfersResponse>, count: number) {
  const seen: WatchTransfersResponse[] = [];
  for await (const one of messages) if (seen.push(one) === count) break;
  return seen;
}

test("a watch that breaks resumes after the last message, also one without a transfer", async (t) => {
  const { requests, engine } = await start(
    t,
    (call) => {
      call.write(message(3));
      call.write(change(4));
      call.write(message(9));
      fail(call, status.UNAVAILABLE);
    },
    (call) => {
      call.write(change(10));
    },
  );
  const filter = { requestId: "r" };
  const seen = await take(engine.watch({ filter }), 2);
  assert.deepEqual(seen.map((one) => one.transfer?.transferId), ["t4", "t10"]);
  const asked = requests.map(({ afterEventSeq, incarnation, filter: by }) => [afterEventSeq, incarnation, by?.requestId]);
  assert.deepEqual(asked, [[0, 0, "r"], [9, 7, "r"]]);
});

test("a watch starts after any reply's header", async (t) => {
  const { requests, engine } = await start(t, (call) => call.write(change(6)));
  await take(engine.watch({ after: { eventSeq: 5, incarnation: 7 } }), 1);
  assert.deepEqual([requests[0]!.afterEventSeq, requests[0]!.incarnation], [5, 7]);
});

test("a watch resumes after a stream that the server ended", async (t) => {
  const { requests, engine } = await start(
    t,
    (call) => {
      call.write(change(1));
      call.end();
    },
    (call) => {
      call.write(change(2));
      call.end();
    },
    (call) => call.write(change(3)),
  );
  const seen = await take(engine.watch(), 3);
  assert.deepEqual(seen.map((one) => one.header?.eventSeq), [1, 2, 3]);
  assert.deepEqual(requests.map((request) => request.afterEventSeq), [0, 1, 2]);
});

test("a watch whose connection is cut resumes when the server is back", async (t) => {
  const { engine, server } = await start(t, (call) => call.write(change(1)));
  const changes = engine.watch();
  assert.equal((await changes.next()).value?.header?.eventSeq, 1);
  const next = changes.next();
  server.stop();
  const again = new Inbox<WatchTransfersRequest>();
  const watchTransfers = (call: Watching) => {
    again.put(call.request);
    call.write(complete(change(2)));
  };
  await serve(t, { transfers: { watchTransfers } }, server.port);
  assert.equal((await again.take()).afterEventSeq, 1);
  assert.equal((await next).value?.header?.eventSeq, 2);
  await changes.return();
});

test("lost history is handed on, and the watch goes on", async (t) => {
  const { engine } = await start(t, (call) => {
    call.write(message(50, { historyLost: true }));
    call.write(change(51));
  });
  const seen = await take(engine.watch({ after: { eventSeq: 1, incarnation: 7 } }), 2);
  assert.deepEqual(seen.map((one) => one.historyLost), [true, false]);
});

test("a life that is over ends the watch", async (t) => {
  const { requests, engine } = await start(t, (call) => {
    call.write(change(1));
    fail(call, status.ABORTED, { reason: "INCARNATION_CHANGED" });
  });
  const changes = engine.watch();
  assert.equal((await changes.next()).value?.header?.eventSeq, 1);
  await assert.rejects(changes.next(), { reason: "INCARNATION_CHANGED" });
  assert.equal(requests.length, 1);
});

test("a message of another life ends the watch", async (t) => {
  const { engine } = await start(t, (call) => call.write(change(1, 8)));
  const changes = engine.watch({ after: { eventSeq: 0, incarnation: 7 } });
  await assert.rejects(changes.next(), { reason: "INCARNATION_CHANGED", incarnation: 8 });
});

test("an error that will not pass ends the watch", async (t) => {
  const { requests, engine } = await start(t, (call) => fail(call, status.INVALID_ARGUMENT, { reason: "INVALID_FIELD" }));
  await assert.rejects(engine.watch().next(), { reason: "INVALID_FIELD" });
  assert.equal(requests.length, 1);
});

test("a watcher that reads too slowly resumes after the delay that the server states", async (t) => {
  const retryDelay = { seconds: 0, nanos: 300_000_000 };
  const { engine } = await start(
    t,
    (call) => fail(call, status.RESOURCE_EXHAUSTED, { reason: "LIMIT_EXCEEDED", retryDelay }),
    (call) => call.write(change(1)),
  );
  const before = performance.now();
  await take(engine.watch(), 1);
  assert(performance.now() - before >= 290);
});

test("leaving the loop ends the stream at the server", async (t) => {
  const { cancelled, engine } = await start(t, (call) => call.write(change(1)));
  await take(engine.watch(), 1);
  await cancelled.take();
});

test("a signal ends a watch with its reason", async (t) => {
  const stop = new AbortController();
  const { engine } = await start(t, () => stop.abort(new Error("enough")));
  await assert.rejects(engine.watch({ signal: stop.signal }).next(), { message: "enough" });
});

test("closing the client ends its watches", async (t) => {
  const { engine } = await start(t, () => engine.close());
  await assert.rejects(engine.watch().next(), /closed/);
});

test("a watch whose message is too long ends", async (t) => {
  const { requests, engine } = await start(t, ...Array(3).fill((call: Watching) => {
    call.write(message(1, { transfer: { transferId: "x".repeat(5 << 20), state: 1 } })); // longer than a client accepts
  }));
  await assert.rejects(take(engine.watch(), 1), { code: status.RESOURCE_EXHAUSTED });
  assert.equal(requests.length, 1);
});
