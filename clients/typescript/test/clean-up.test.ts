import assert from "node:assert/strict";
import { status } from "@grpc/grpc-js";
import { test, type TestContext } from "node:test";
import { CancelOutcome, cleanUp, type CancelTransferRequest } from "kvgrpc";
import { Inbox, client, refusal, serve, type Call } from "./server.js";

async function side(t: TestContext, answer: (request: CancelTransferRequest) => unknown) {
  const requests: CancelTransferRequest[] = [];
  const cancelTransfer = ({ request }: Call<CancelTransferRequest>) => {
    requests.push(request);
    return answer(request);
  };
  return { requests, client: client(t, await serve(t, { transfers: { cancelTransfer } })) };
}

const outcome = CancelOutcome.CANCEL_OUTCOME_CANCELLED_IN_FLIGHT;

test("both sides cancel and free, under keys of their own", async (t) => {
  const p = await side(t, () => ({ outcome, transfers: [{ transferId: "p" }] }));
  const d = await side(t, () => ({ outcome: CancelOutcome.CANCEL_OUTCOME_TOMBSTONED }));
  const transferKey = new Uint8Array(16).fill(5);
  const [first, second] = await cleanUp(
    [
      { client: p.client, transferKey, freeAllocationIds: ["a1", "a2"] },
      { client: d.client, transferId: "t" },
    ],
    { message: "the client hung up" },
  );
  assert.equal(first!.outcome, outcome);
  assert.equal(first!.transfers[0]!.transferId, "p");
  assert.equal(second!.outcome, CancelOutcome.CANCEL_OUTCOME_TOMBSTONED);
  const [atP, atD] = [p.requests[0]!, d.requests[0]!];
  assert.deepEqual([...atP.transferKey!], [...transferKey]);
  assert.deepEqual(atP.freeAllocationIds, ["a1", "a2"]);
  assert.equal(atP.message, "the client hung up");
  assert.equal(atD.transferId, "t");
  assert.equal(atD.transferKey, undefined);
  assert.notEqual(atP.idempotencyKey, atD.idempotencyKey);
});

test("the sides are told at the same time", async (t) => {
  const arrived = new Inbox<true>();
  const both = Promise.all([arrived.take(), arrived.take()]);
  const answer = async () => {
    arrived.put(true);
    await both; // neither answers before the other has been asked
    return { outcome };
  };
  const [p, d] = [await side(t, answer), await side(t, answer)];
  const transferKey = new Uint8Array(16);
  const cleaned = await cleanUp([{ client: p.client, transferKey }, { client: d.client, transferKey }]);
  assert.deepEqual(cleaned.map((one) => one.outcome), [outcome, outcome]);
});

test("a side that fails does not keep the other from being told", async (t) => {
  const p = await side(t, () => {
    throw refusal(status.NOT_FOUND, "gone", { reason: "BLOCK_NOT_ALLOCATED" });
  });
  const d = await side(t, () => ({ outcome }));
  const transferKey = new Uint8Array(16);
  const [first, second] = await cleanUp([{ client: p.client, transferKey }, { client: d.client, transferKey }]);
  assert.equal(first!.error?.reason, "BLOCK_NOT_ALLOCATED");
  assert.equal(second!.outcome, outcome);
});

test("a side whose client is closed does not keep the other from being told", async (t) => {
  const p = await side(t, () => ({ outcome }));
  const d = await side(t, () => ({ outcome }));
  p.client.close();
  const transferKey = new Uint8Array(16);
  const [first, second] = await cleanUp([{ client: p.client, transferKey }, { client: d.client, transferKey }]);
  assert.equal(first!.error?.code, status.CANCELLED);
  assert.match(first!.error!.message, /closed/);
  assert.equal(second!.outcome, outcome);
});

test("a signal ends a clean-up once every side was told or given up", async (t) => {
  const stop = new AbortController();
  const p = await side(t, () => (stop.abort(new Error("enough")), new Promise(() => {})));
  const transferKey = new Uint8Array(16);
  await assert.rejects(cleanUp([{ client: p.client, transferKey }], { signal: stop.signal }), { message: "enough" });
});
