import assert from "node:assert/strict";
import { status } from "@grpc/grpc-js";
import { test, type TestContext } from "node:test";
import { FailureReason, KvGrpcError, fromStatus } from "kvgrpc";
import { client, fail, refusal, serve, type Writing } from "./server.js";

async function failed(t: TestContext, error: object): Promise<KvGrpcError> {
  const server = await serve(t, { leases: { getLease: () => Promise.reject(error) } });
  const thrown = await client(t, server)
    .leases.getLease({ lease: { leaseId: "l" } })
    .then(() => undefined, (caught: unknown) => caught);
  assert(thrown instanceof KvGrpcError);
  return thrown;
}

test("an error holds all that the server states", async (t) => {
  const error = await failed(
    t,
    refusal(status.OUT_OF_RANGE, "block 9 does not exist", {
      reason: "BLOCK_OUT_OF_RANGE",
      metadata: { next: "FIX_REQUEST", engine_id: "P", incarnation: "9007199254740991", group: "0" },
      violations: [{ field: "blocks.groups[0]", description: "9 is too large" }],
      retryDelay: { seconds: 1, nanos: 500_000_000 },
    }),
  );
  assert.equal(error.code, status.OUT_OF_RANGE);
  assert.equal(error.codeName, "OUT_OF_RANGE");
  assert.equal(error.message, "block 9 does not exist");
  assert.equal(error.reason, "BLOCK_OUT_OF_RANGE");
  assert.equal(error.next, "FIX_REQUEST");
  assert.equal(error.engineId, "P");
  assert.equal(error.incarnation, Number.MAX_SAFE_INTEGER);
  assert.deepEqual(error.violations, [{ field: "blocks.groups[0]", description: "9 is too large" }]);
  assert.equal(error.retryDelayMs, 1500);
  assert.equal(error.metadata.group, "0");
});

test("a status without details is a typed error with its code", async (t) => {
  const error = await failed(t, refusal(status.PERMISSION_DENIED, "no"));
  assert.equal(error.code, status.PERMISSION_DENIED);
  assert.equal(error.reason, "UNSPECIFIED");
  assert.equal(error.next, "UNSPECIFIED");
  assert.equal(error.retryDelayMs, undefined);
});

test("a reason of another domain is not a reason of kvgrpc", async (t) => {
  const error = await failed(t, refusal(status.ABORTED, "no", { domain: "example.com", reason: "DRAINING" }));
  assert.equal(error.reason, "UNSPECIFIED");
});

test("a reason that this library does not know is told by its name", async (t) => {
  const error = await failed(t, refusal(status.ABORTED, "no", { reason: "SOMETHING_NEW" }));
  assert.equal(error.reason, "SOMETHING_NEW");
});

test("details that cannot be read do not hide the error", () => {
  const made = refusal(status.ABORTED, "no", { reason: "INCARNATION_CHANGED" });
  const whole = made.metadata.get("grpc-status-details-bin")[0] as Buffer;
  for (let length = 0; length < whole.length; length++) {
    made.metadata.set("grpc-status-details-bin", whole.subarray(0, length));
    assert.equal(fromStatus(made).code, status.ABORTED);
  }
});

test("every reason of the schema can be compared by its name", () => {
  const error = new KvGrpcError(status.ABORTED, "", { reason: "INCARNATION_CHANGED" });
  assert(`FAILURE_REASON_${error.reason}` in FailureReason);
});

test("an error of a reason that this library does not know has no step", async (t) => {
  const error = await failed(t, refusal(status.ABORTED, "no", { reason: "SOMETHING_NEW", metadata: { next: "RETRY_HERE" } }));
  assert.deepEqual([error.next, error.metadata.next], ["UNSPECIFIED", "RETRY_HERE"]);
});

test("an error tells what was called, and where, and the key that repeats the call", async (t) => {
  const allocateBlocks = () => Promise.reject(refusal(status.RESOURCE_EXHAUSTED, "full"));
  const watchTransfers = (call: Writing<unknown, unknown>) => fail(call, status.PERMISSION_DENIED);
  const server = await serve(t, { pool: { allocateBlocks }, transfers: { watchTransfers } });
  const engine = client(t, server);
  await assert.rejects(engine.pool.allocateBlocks({ idempotencyKey: "mine" }), {
    method: "PoolService/AllocateBlocks",
    address: server.address,
    idempotencyKey: "mine",
  });
  await assert.rejects(engine.watch().next(), {
    method: "TransferService/WatchTransfers",
    address: server.address,
    idempotencyKey: "",
  });
});
