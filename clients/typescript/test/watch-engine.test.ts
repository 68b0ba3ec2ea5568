import assert from "node:assert/strict";
import { status } from "@grpc/grpc-js";
import { test, type TestContext } from "node:test";
import { Admission, WatchEngineResponse, takesWork, type EngineNews, type WatchEngineRequest } from "kvgrpc";
import { client, fail, serve, type Writing } from "./server.js";

type Watching = Writing<WatchEngineRequest, WatchEngineResponse>;

const OPEN = WatchEngineResponse.fromPartial({
  header: { engineId: "P", incarnation: 7 },
  status: { admission: Admission.ADMISSION_OPEN },
});

async function start(t: TestContext, ...plays: ((call: Watching) => void)[]) {
  const requests: WatchEngineRequest[] = [];
  const watchEngine = (call: Watching) => {
    requests.push(call.request);
    plays.shift()?.(call);
  };
  const server = await serve(t, { handshake: { watchEngine } });
  return { requests, server, engine: client(t, server) };
}

async function take(news: AsyncIterable<EngineNews>, count: number) {
  const seen: EngineNews[] = [];
  for await (const one of news) if (seen.push(one) === count) break;
  return seen;
}

test("an engine that is lost is told once as unreachable, and again as it is when it is back", async (t) => {
  const { requests, engine } = await start(
    t,
    (call) => (call.write(OPEN), fail(call, status.UNAVAILABLE)),
    (call) => fail(call, status.UNAVAILABLE),
    (call) => call.write(OPEN),
  );
  const [first, lost, back] = await take(engine.watchEngine({ minIntervalMs: 500 }), 3);
  assert(first!.reachable && takesWork(first.status));
  assert(!lost!.reachable && lost.error.code === status.UNAVAILABLE);
  assert(back!.reachable && back.header?.incarnation === 7);
  assert.equal(requests.length, 3);
  assert.deepEqual(requests[0]!.minInterval, { seconds: 0, nanos: 500_000_000 });
});

test("an engine that was never there is told as unreachable", async (t) => {
  const { engine, server } = await start(t);
  server.stop();
  const [news] = await take(engine.watchEngine(), 1);
  assert.equal(news!.reachable, false);
});

test("an engine that is silent is unreachable", async (t) => {
  const { engine } = await start(t, (call) => call.write(OPEN), (call) => call.write(OPEN));
  const news = await take(engine.watchEngine({ silenceMs: 100 }), 3);
  assert.deepEqual(news.map((one) => one.reachable), [true, false, true]);
});

test("an engine that ends its stream is connected to again", async (t) => {
  const { engine } = await start(t, (call) => (call.write(OPEN), call.end()), (call) => call.write(OPEN));
  const news = await take(engine.watchEngine(), 3);
  assert.deepEqual(news.map((one) => one.reachable), [true, false, true]);
});

test("a request that is wrong ends the watch", async (t) => {
  const { engine } = await start(t, (call) => fail(call, status.INVALID_ARGUMENT, { reason: "INVALID_FIELD" }));
  await assert.rejects(engine.watchEngine({ minIntervalMs: -1 }).next(), { reason: "INVALID_FIELD" });
});
