import assert from "node:assert/strict";
import { test } from "node:test";
import { status } from "@grpc/grpc-js";
import {
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
  redacted,
} from "kvgrpc";

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
