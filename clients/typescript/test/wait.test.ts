import assert from "node:assert/strict";
import { status } from "@grpc/grpc-js";
import { test, type TestContext } from "node:test";
import { TransferState, WaitCondition, milliseconds, type WaitTransferRequest } from "kvgrpc";
import { client, refusal, serve, type Call } from "./server.js";

/** Connects without gRPC's own retries, so that each handler's answer is one attempt of the wait. */
const ONE_ATTEMPT = { channelOptions: { "grpc.enable_retries": 0 } };
const ENDED = { transfer: { transferId: "t", state: TransferState.TRANSFER_STATE_SUCCEEDED }, conditionMet: true };
const PENDING = { transfer: { transferId: "t", state: TransferState.TRANSFER_STATE_PENDING }, conditionMet: false };

async function start(t: TestContext, ...answers: (() => object)[]) {
  const requests: WaitTransferRequest[] = [];
  const waitTransfer = ({ request }: Call<WaitTransferRequest>) => {
    requests.push(request);
    return (answers.shift() ?? (() => PENDING))();
  };
  const server = await serve(t, { transfers: { waitTransfer } });
  return { requests, engine: client(t, server, ONE_ATTEMPT) };
}

function unavailable(): object {
  throw refusal(status.UNAVAILABLE, "away");
}

test("a long wait is several calls of half a minute at most", async (t) => {
  const { requests, engine } = await start(t, () => PENDING, () => ENDED);
  const until = WaitCondition.WAIT_CONDITION_RETURNED;
  const waited = await engine.wait("t", { until, timeoutMs: 600_000 });
  assert.equal(waited.conditionMet, true);
  assert.equal(waited.transfer.state, TransferState.TRANSFER_STATE_SUCCEEDED);
  assert.deepEqual(requests.map((request) => milliseconds(request.timeout)), [30_000, 30_000]);
  assert(requests.every((request) => request.until === until && request.transferId === "t"));
});

test("a wait survives UNAVAILABLE while time is left", async (t) => {
  const { requests, engine } = await start(t, unavailable, unavailable, () => ENDED);
  assert.equal((await engine.wait("t")).conditionMet, true);
  assert.equal(requests.length, 3);
});

test("a wait survives what passes, and calls that no server answered", async (t) => {
  const passing = [
    refusal(status.RESOURCE_EXHAUSTED, "full", { reason: "QUEUE_FULL" }),
    refusal(status.DEADLINE_EXCEEDED, "late", { reason: "DEADLINE" }),
    refusal(status.CANCELLED, "reset by a proxy"),
    refusal(status.INTERNAL, "RST_STREAM"),
    refusal(status.UNKNOWN, "no trailers"),
  ];
  const answers = passing.map((error) => () => {
    throw error;
  });
  const { requests, engine } = await start(t, ...answers, () => ENDED);
  assert.equal((await engine.wait("t")).conditionMet, true);
  assert.equal(requests.length, 6);
});

test("an error with a reason that does not pass ends the wait", async (t) => {
  for (const code of [status.CANCELLED, status.INTERNAL, status.UNKNOWN]) {
    const { requests, engine } = await start(t, () => {
      throw refusal(code, "a defect", { reason: "INTERNAL" });
    });
    await assert.rejects(engine.wait("t"), { code });
    assert.equal(requests.length, 1);
  }
});

test("a wait ends with its client, also in a call and in a pause", async (t) => {
  const inCall = await start(t, () => (setTimeout(() => inCall.engine.close(), 20), new Promise(() => {})));
  await assert.rejects(inCall.engine.wait("t"), /the client is closed/);
  const inPause = await start(t, () => {
    setTimeout(() => inPause.engine.close(), 20);
    throw refusal(status.UNAVAILABLE, "away", { retryDelay: { seconds: 60, nanos: 0 } });
  });
  await assert.rejects(inPause.engine.wait("t"), /the client is closed/);
  assert.equal(inPause.requests.length, 1);
});

test("a server that is away at the end of the wait is an error", async (t) => {
  const { engine } = await start(t, ...Array(10).fill(unavailable));
  await assert.rejects(engine.wait("t", { timeoutMs: 250 }), { code: status.UNAVAILABLE });
});

test("a wait whose time is over tells the transfer as it is", async (t) => {
  const { requests, engine } = await start(t);
  const waited = await engine.wait("t", { timeoutMs: 150 });
  assert.equal(waited.conditionMet, false);
  assert.equal(waited.transfer.state, TransferState.TRANSFER_STATE_PENDING);
  assert(requests.length >= 2 && requests.length <= 4, "asked again, and not in a tight loop");
});

test("a wait without time asks once", async (t) => {
  const { requests, engine } = await start(t);
  assert.equal((await engine.wait("t", { timeoutMs: 0 })).conditionMet, false);
  assert.equal(requests.length, 1);
});

test("an unknown transfer ends the wait", async (t) => {
  const { engine } = await start(t, () => {
    throw refusal(status.NOT_FOUND, "no such transfer", { reason: "TRANSFER_NOT_FOUND" });
  });
  await assert.rejects(engine.wait("t"), { reason: "TRANSFER_NOT_FOUND" });
});

test("a signal ends a wait", async (t) => {
  const stop = new AbortController();
  const { engine } = await start(t, () => (stop.abort(new Error("enough")), unavailable()));
  await assert.rejects(engine.wait("t", { signal: stop.signal }), { message: "enough" });
});

test("a server that asks for a longer pause than there is time is asked once more at the end", async (t) => {
  const full = () => {
    throw refusal(status.RESOURCE_EXHAUSTED, "full", { reason: "LIMIT_EXCEEDED", retryDelay: { seconds: 60, nanos: 0 } });
  };
  const { requests, engine } = await start(t, full, () => ENDED);
  assert.equal((await engine.wait("t", { timeoutMs: 200 })).conditionMet, true);
  assert.equal(requests.length, 2);
});
