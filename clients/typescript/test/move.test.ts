import assert from "node:assert/strict";
import { test } from "node:test";
import { status } from "@grpc/grpc-js";
import {
  Blocks,
  Content,
  FailureReason,
  Grant,
  HandshakeRequest,
  KvGrpcError,
  LeaseState,
  NextStep,
  PullBlocksRequest,
  Transfer,
  TransferPhase,
  TransferState,
  checkTransfer,
  isLeaseOver,
  move,
  redacted,
  type CancelTransferRequest,
} from "kvgrpc";
import { client, refusal, serve, type Call } from "./server.js";

test("a transfer that ended without its KV is an error with what its failure says", () => {
  const failed = Transfer.fromPartial({
    transferId: "t-1",
    state: TransferState.TRANSFER_STATE_FAILED,
    failure: {
      reason: FailureReason.FAILURE_REASON_LEASE_EXPIRED,
      next: NextStep.NEXT_STEP_RECOMPUTE,
      phase: TransferPhase.TRANSFER_PHASE_SETTLE,
      message: "too late",
    },
  });
  assert.throws(
    () => checkTransfer(failed),
    (error) => {
      assert(error instanceof KvGrpcError);
      assert.deepEqual([error.code, error.reason, error.next], [status.ABORTED, "LEASE_EXPIRED", "RECOMPUTE"]);
      assert.deepEqual([error.message, error.metadata], ["too late", { transfer_id: "t-1", phase: "settle" }]);
      return true;
    },
  );
});

test("a transfer that succeeded, or is not over, is no error", () => {
  for (const state of [TransferState.TRANSFER_STATE_ACTIVE, TransferState.TRANSFER_STATE_SUCCEEDED]) {
    checkTransfer(Transfer.fromPartial({ state }));
  }
  const cancelled = Transfer.fromPartial({ state: TransferState.TRANSFER_STATE_CANCELLED });
  assert.throws(() => checkTransfer(cancelled), { reason: "CANCELLED" });
});

test("what is printed redacted has no secret at any depth", () => {
  const secret = Buffer.from("open sesame");
  const grant = Grant.fromPartial({ token: secret, engineId: "P" });
  for (const message of [
    grant,
    PullBlocksRequest.fromPartial({ grant, transferKey: secret }),
    HandshakeRequest.fromPartial({ proofs: [secret, secret], expectedEngineId: "P" }),
  ]) {
    const text = redacted(message);
    assert.match(text, /\[REDACTED\]/);
    assert.match(text, /"P"/);
    assert.doesNotMatch(text, new RegExp(`open sesame|${secret.toString("base64").slice(0, 12)}|111,112,101`));
  }
  assert.deepEqual(Buffer.from(grant.token), secret, "the message is as it was");
});

test("a lease that was taken back is over", () => {
  assert(isLeaseOver({ state: LeaseState.LEASE_STATE_RECLAIMED }));
});

test("a move tells why it failed also when a client is closed before its clean-up", async (t) => {
  const told: CancelTransferRequest[] = [];
  const cancelTransfer = ({ request }: Call<CancelTransferRequest>) => (told.push(request), {});
  const taken = { blocks: { incarnation: 7, allocationId: "a-1", groups: [] } };
  const finishedBlocks = () => {
    source.close();
    throw refusal(status.ABORTED, "of an earlier life", { reason: "INCARNATION_CHANGED" });
  };
  const source = client(t, await serve(t, { handoff: { finishedBlocks }, transfers: { cancelTransfer } }));
  const pool = { allocateBlocks: () => taken };
  const destination = client(t, await serve(t, { pool, transfers: { cancelTransfer } }));
  await assert.rejects(move(source, destination, Blocks.fromPartial({}), Content.fromPartial({})), {
    reason: "INCARNATION_CHANGED",
  });
  assert.deepEqual(told.map((request) => request.freeAllocationIds), [["a-1"]], "the destination is told all the same");
});
