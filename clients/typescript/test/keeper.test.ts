import assert from "node:assert/strict";
import { status } from "@grpc/grpc-js";
import { test, type TestContext } from "node:test";
import {
  FailureReason,
  KeepAliveResponse,
  LeaseState,
  duration,
  milliseconds,
  type KeepAliveRequest,
} from "kvgrpc";
import { Inbox, client, fail, serve, type Talking } from "./server.js";

type Renewals = Talking<KeepAliveRequest, KeepAliveResponse>;
type Row = { remaining?: ReturnType<typeof duration>; state?: LeaseState; reason?: FailureReason };

const LIVE = LeaseState.LEASE_STATE_LIVE;
const granted = (ms: number): Row => ({ remaining: duration(ms), state: LIVE });
const ids = (request: KeepAliveRequest) => request.leases.map((lease) => lease.leaseId);

interface Asked {
  request: KeepAliveRequest;
  call: Renewals;
  at: number;
  /** Answers with one row for each lease. */
  answer(...rows: Row[]): void;
}

/** Lets the test answer each renewal itself. */
async function start(t: TestContext) {
  const asked = new Inbox<Asked>();
  const streams: Renewals[] = [];
  const keepAlive = (call: Renewals) => {
    streams.push(call);
    call.on("data", (request: KeepAliveRequest) => {
      const answer = (...leases: Row[]) => void call.write(KeepAliveResponse.fromPartial({ leases }));
      asked.put({ request, call, at: performance.now(), answer });
    });
    call.on("end", () => call.end());
  };
  const server = await serve(t, { leases: { keepAlive } });
  return { asked, streams, server, engine: client(t, server) };
}

test("a lease is renewed when a third of what was granted has passed, over one stream", async (t) => {
  const { asked, streams, engine } = await start(t);
  const keeper = engine.keepAlive(["a"], { ttlMs: 900 });
  const first = await asked.take();
  assert.equal(milliseconds(first.request.ttl), 900);
  first.answer(granted(900));
  const second = await asked.take();
  second.answer(granted(900));
  // The first message includes the connection. The time counts from when the message was sent.
  const passed = (await asked.take()).at - second.at;
  assert(passed >= 270 && passed < 600, `renewed after ${passed} ms`);
  assert.equal(streams.length, 1);
  assert.equal(keeper.leases[0]!.state, LIVE);
  assert(keeper.leases[0]!.remainingMs <= 900);
});

test("leases are named by id, grant, lease or reference, and renewed in one message", async (t) => {
  const { asked, engine } = await start(t);
  const token = new Uint8Array([1, 2]);
  const grant = { token, leaseId: "g" } as never;
  const lease = { leaseId: "l", state: LIVE } as never;
  engine.keepAlive(["a", grant, lease, { leaseId: "r" }]);
  const { request } = await asked.take();
  assert.deepEqual(ids(request), ["a", undefined, "l", "r"]);
  assert.deepEqual([...request.leases[1]!.grant!.token], [1, 2]);
});

test("a lease that is over is told with its state and reason, and is renewed no more", async (t) => {
  const { asked, engine } = await start(t);
  const keeper = engine.keepAlive(["a", "b"]);
  const [a, b] = keeper.leases;
  const reason = FailureReason.FAILURE_REASON_LEASE_RELEASED;
  (await asked.take()).answer(granted(300), { state: LeaseState.LEASE_STATE_DONE, reason });
  assert.deepEqual(await b!.over, { state: LeaseState.LEASE_STATE_DONE, reason: "LEASE_RELEASED" });
  assert.equal(b!.remainingMs, 0);
  assert.deepEqual(ids((await asked.take()).request), ["a"]);
  assert.deepEqual(keeper.leases, [a]);
});

test("a lease that the server does not know is over; its reason may be one that this library does not know", async (t) => {
  const { asked, engine } = await start(t);
  const [a, b] = engine.keepAlive(["a", "b"]).leases;
  const rows = [{ reason: FailureReason.FAILURE_REASON_LEASE_NOT_FOUND }, { reason: 4711 as never }];
  (await asked.take()).answer(...rows);
  assert.deepEqual(await a!.over, { state: LeaseState.LEASE_STATE_UNSPECIFIED, reason: "LEASE_NOT_FOUND" });
  assert.equal((await b!.over).reason, "INTERNAL");
});

test("a state that this library does not know is no end", async (t) => {
  const { asked, engine } = await start(t);
  const [a] = engine.keepAlive(["a"]).leases;
  (await asked.take()).answer({ remaining: duration(300), state: 99 as never });
  await asked.take();
  assert.equal(a!.isOver, false);
});

test("a stream that breaks is opened again", async (t) => {
  const { asked, streams, engine } = await start(t);
  const [a] = engine.keepAlive(["a"]).leases;
  (await asked.take()).answer(granted(600));
  fail((await asked.take()).call, status.UNAVAILABLE);
  (await asked.take()).answer(granted(600));
  await asked.take();
  assert.equal(streams.length, 2);
  assert.equal(a!.isOver, false);
});

test("a server that does not answer in time gets another stream", async (t) => {
  const { asked, streams, engine } = await start(t);
  engine.keepAlive(["a"]);
  (await asked.take()).answer(granted(900));
  await asked.take(); // the request stays unanswered
  (await asked.take()).answer(granted(900));
  assert.equal(streams.length, 2);
});

test("a lease that could not be renewed in time counts as expired", async (t) => {
  const { asked, server, engine } = await start(t);
  const [a] = engine.keepAlive(["a"]).leases;
  (await asked.take()).answer(granted(300));
  await asked.take();
  server.stop();
  assert.deepEqual(await a!.over, { state: LeaseState.LEASE_STATE_EXPIRED, reason: "LEASE_EXPIRED" });
});

test("a refusal of all renewals is told to every lease", async (t) => {
  const { asked, engine } = await start(t);
  const keeper = engine.keepAlive(["a", "b"], { ttlMs: -1 });
  const leases = keeper.leases;
  fail((await asked.take()).call, status.INVALID_ARGUMENT, { reason: "TTL_INVALID" });
  for (const lease of leases) {
    const { reason, error } = await lease.over;
    assert.equal(reason, "TTL_INVALID");
    assert.equal(error?.code, status.INVALID_ARGUMENT);
  }
  assert.deepEqual(keeper.leases, []);
});

test("a lease that is added is renewed at once; one that is dropped no more", async (t) => {
  const { asked, engine } = await start(t);
  const keeper = engine.keepAlive(["a"]);
  (await asked.take()).answer(granted(60_000));
  const b = keeper.add("b");
  const second = await asked.take();
  assert.deepEqual(ids(second.request), ["b"]);
  second.answer(granted(300));
  assert.deepEqual(ids((await asked.take()).request), ["b"]);
  keeper.drop(b);
  assert.equal(keeper.leases.length, 1);
});

const NOT_KEPT = { state: LIVE, reason: "UNSPECIFIED" };

test("a lease that is not kept any more is told as live, and not as over", async (t) => {
  const { asked, engine } = await start(t);
  const [a] = engine.keepAlive(["a"]).leases;
  const keeper = engine.keepAlive(["b", "c"]);
  const [b, c] = keeper.leases;
  for (const renewal of [await asked.take(), await asked.take()]) {
    renewal.answer(...renewal.request.leases.map(() => granted(60_000)));
  }
  while (!c!.remainingMs) await new Promise((resolve) => setTimeout(resolve, 10));
  keeper.drop(c!);
  assert.deepEqual(await c!.over, NOT_KEPT);
  assert.equal(c!.isOver, false);
  assert(c!.remainingMs > 50_000);
  keeper.close();
  assert.deepEqual(await b!.over, NOT_KEPT);
  engine.close();
  assert.deepEqual(await a!.over, NOT_KEPT);
});

test("an answer that comes after a lease was dropped changes nothing", async (t) => {
  const { asked, engine } = await start(t);
  const keeper = engine.keepAlive(["a", "b"]);
  const [a, b] = keeper.leases;
  const first = await asked.take();
  keeper.drop(a!);
  first.answer(granted(300), granted(600));
  await asked.take();
  assert.deepEqual(await a!.over, NOT_KEPT);
  assert.equal(a!.remainingMs, 0);
  assert.equal(b!.isOver, false);
});

test("a keeper that is closed ends its stream and no lease", async (t) => {
  const { asked, engine } = await start(t);
  const keeper = engine.keepAlive(["a"]);
  const first = await asked.take();
  first.answer(granted(60_000));
  const ended = new Promise((resolve) => first.call.on("cancelled", resolve));
  keeper.close();
  await ended;
  assert.throws(() => keeper.add("b"));
});
