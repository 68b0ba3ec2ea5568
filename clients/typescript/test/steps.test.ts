// The steps of a scheduler: one stream for all, with the deadlines, errors and ends of calls.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Metadata, status } from "@grpc/grpc-js";
import { KvGrpcError, type ScheduleRequest, type ScheduleResponse } from "kvgrpc";
import { client, fail, Inbox, serve, type Talking } from "./server.js";

type Stream = Talking<ScheduleRequest, ScheduleResponse>;

/** Answers each step with the number of the stream as its only news. */
function answering(seen: ScheduleRequest[], onStep: (call: Stream, step: ScheduleRequest) => boolean = () => true) {
  let streams = 0;
  return (call: Stream) => {
    const seq = ++streams;
    call.on("data", (step: ScheduleRequest) => {
      seen.push(step);
      if (onStep(call, step)) {
        call.write({ header: undefined, answers: [], news: [{ seq, requestId: "r" }], more: false });
      }
    });
    call.on("end", () => call.end());
  };
}

const streamOf = (reply: ScheduleResponse) => reply.news[0]!.seq;

test("steps go over one stream, in the order in which they were made", async (t) => {
  const seen: ScheduleRequest[] = [];
  const engine = client(t, await serve(t, { scheduler: { schedule: answering(seen) } }));
  const steps = engine.steps();
  const replies = await Promise.all([1, 2, 3].map((afterSeq) => steps.step({ afterSeq })));
  assert.deepEqual(seen.map((step) => step.afterSeq), [1, 2, 3]);
  assert.deepEqual(replies.map(streamOf), [1, 1, 1]);
});

test("a step whose stream is lost is sent again over another one", async (t) => {
  const seen: ScheduleRequest[] = [];
  let lose = true;
  const schedule = answering(seen, (call) => {
    if (lose) call.end();
    return !lose;
  });
  const server = await serve(t, { scheduler: { schedule } });
  const steps = client(t, server).steps();
  setTimeout(() => (lose = false), 50);
  assert.ok(streamOf(await steps.step({ afterSeq: 7 })) > 1);
  assert.deepEqual(new Set(seen.map((step) => step.afterSeq)), new Set([7]));
  server.stop();
  await serve(t, { scheduler: { schedule } }, server.port);
  await steps.step({ afterSeq: 8 });
  assert.equal(seen.at(-1)!.afterSeq, 8);
});

test("a refused step is its error, repeated only where that may help", async (t) => {
  for (const [code, reason, times] of [
    [status.ABORTED, "INCARNATION_CHANGED", 1],
    [status.UNAVAILABLE, "NO_POOL", 4],
  ] as const) {
    const seen: ScheduleRequest[] = [];
    const schedule = answering(seen, (call) => (fail(call, code, { reason }), false));
    const steps = client(t, await serve(t, { scheduler: { schedule } })).steps();
    await assert.rejects(steps.step({}), (error) => error instanceof KvGrpcError && error.code === code);
    assert.equal(seen.length, times);
  }
});

test("a step that is late or given up leaves no answer to the next one", async (t) => {
  const seen: ScheduleRequest[] = [];
  const waits = new Inbox<ScheduleRequest>();
  const schedule = answering(seen, (_, step) => (waits.put(step), step.afterSeq === 0));
  const engine = client(t, await serve(t, { scheduler: { schedule } }));
  const steps = engine.steps();
  await assert.rejects(steps.step({ afterSeq: 1 }, { timeoutMs: 50 }), { code: status.DEADLINE_EXCEEDED });
  assert.equal((await waits.take()).afterSeq, 1);
  const stop = new AbortController();
  const first = steps.step({ afterSeq: 2 }, { signal: stop.signal });
  const second = steps.step({ afterSeq: 3 }, { timeoutMs: 20 });
  await assert.rejects(second, { code: status.DEADLINE_EXCEEDED });
  assert.equal((await waits.take()).afterSeq, 2);
  stop.abort(new Error("enough"));
  await assert.rejects(first, { message: "enough" });
  assert.equal(streamOf(await steps.step({})), 3);
  await assert.rejects(steps.step({}, { timeoutMs: 0 }), RangeError);
  const waiting = steps.step({ afterSeq: 4 });
  while ((await waits.take()).afterSeq !== 4);
  engine.close();
  await assert.rejects(waiting, /closed/);
});

test("the trace of a step is that of the requests that arrive in it", async (t) => {
  const seen: ScheduleRequest[] = [];
  const opened: Metadata[] = [];
  const answer = answering(seen);
  const schedule = (call: Stream) => (opened.push(call.metadata), answer(call));
  const parents = ["00-a-b-01", "00-c-d-01"];
  const options = { traceparent: () => parents.shift() };
  const steps = client(t, await serve(t, { scheduler: { schedule } }), options).steps({ "x-one": "1" });
  const calls = [{ requestArrived: { requestId: "r" } }, { requestArrived: { requestId: "s", traceparent: "own" } }];
  await steps.step({ calls });
  await steps.step({ calls });
  await steps.step({ calls }, { traceparent: "mine" });
  const traces = seen.map((step) => step.calls.map((call) => call.requestArrived!.traceparent));
  assert.deepEqual(traces, [["00-a-b-01", "own"], ["00-c-d-01", "own"], ["mine", "own"]]);
  assert.deepEqual(opened.map((metadata) => metadata.get("traceparent")), [[]]);
  assert.deepEqual(opened[0]!.get("x-one"), ["1"]);
});
