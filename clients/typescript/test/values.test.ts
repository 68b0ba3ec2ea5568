import assert from "node:assert/strict";
import { test } from "node:test";
import {
  Admission,
  CancelOutcome,
  FailureReason,
  KvGrpcError,
  LeaseState,
  MemoryDisposition,
  NextStep,
  OnAbort,
  SERVICE_CONFIG,
  TransferMode,
  TransferState,
  duration,
  durationFromJson,
  durationToJson,
  hasSucceeded,
  intentFromJson,
  intentToJson,
  isLeaseOver,
  isOver,
  mayBeInFlight,
  mayRetry,
  mayReuseMemory,
  memoryOf,
  milliseconds,
  reasonName,
  takesWork,
} from "kvgrpc";
import { OpenAccessRequest } from "../gen/kvgrpc/peer/v1/peer.js";
import { RankServiceService } from "../gen/kvgrpc/peer/v1/rank.js";
import * as rank from "../gen/kvgrpc/session/v1/rank.js";
import * as session from "../gen/kvgrpc/session/v1/session.js";

const UNKNOWN = 4711 as never;

test("a state that is unknown is not an end", () => {
  assert.equal(isOver({ state: TransferState.TRANSFER_STATE_CANCELLED }), true);
  assert.equal(isOver({ state: TransferState.TRANSFER_STATE_ACTIVE }), false);
  assert.equal(isOver({ state: UNKNOWN }), false);
  assert.equal(hasSucceeded({ state: UNKNOWN }), false);
  assert.equal(isLeaseOver({ state: LeaseState.LEASE_STATE_VOIDED }), true);
  assert.equal(isLeaseOver({ state: UNKNOWN }), false);
});

test("memory that is unknown is in quarantine", () => {
  const quarantined = MemoryDisposition.MEMORY_DISPOSITION_QUARANTINED;
  assert.equal(memoryOf({ memory: UNKNOWN }), quarantined);
  assert.equal(memoryOf({ memory: MemoryDisposition.MEMORY_DISPOSITION_UNSPECIFIED }), quarantined);
  assert.equal(memoryOf(undefined), quarantined);
});

test("memory is reused once its transfer is over and it is returned", () => {
  const state = TransferState.TRANSFER_STATE_FAILED;
  const memory = MemoryDisposition.MEMORY_DISPOSITION_RETURNED;
  assert.equal(mayReuseMemory({ state, memory }), true);
  assert.equal(mayReuseMemory({ state, memory: UNKNOWN }), false);
  assert.equal(mayReuseMemory({ state: UNKNOWN, memory }), false);
  assert.equal(mayReuseMemory({ state: TransferState.TRANSFER_STATE_ACTIVE, memory }), false);
  assert.equal(mayReuseMemory(undefined), false);
});

test("a cancel with an unknown outcome may have bytes in flight", () => {
  assert.equal(mayBeInFlight({ outcome: CancelOutcome.CANCEL_OUTCOME_ALREADY_ENDED }), false);
  assert.equal(mayBeInFlight({ outcome: UNKNOWN }), true);
});

test("a failure whose next step or reason is unknown is not retried", () => {
  const reason = FailureReason.FAILURE_REASON_QUEUE_TIMEOUT;
  const next = NextStep.NEXT_STEP_RETRY_OTHER_CONSUMER;
  assert.equal(mayRetry({ reason, next }), true);
  assert.equal(mayRetry({ reason, next: UNKNOWN }), false);
  assert.equal(mayRetry({ reason: UNKNOWN, next }), false);
  assert.equal(mayRetry({ reason: FailureReason.FAILURE_REASON_UNSPECIFIED, next }), false);
  assert.equal(mayRetry({ reason: FailureReason.UNRECOGNIZED, next }), false);
  assert.equal(mayRetry(new KvGrpcError(14, "", { reason: "NO_POOL", next: "RETRY_HERE" })), true);
  assert.equal(mayRetry(new KvGrpcError(14, "", { reason: "NO_POOL", next: "SOMETHING_NEW" })), false);
  assert.equal(mayRetry(new KvGrpcError(14, "", { reason: "MOON_PHASE", next: "RETRY_HERE" })), false);
  assert.equal(mayRetry(new KvGrpcError(14, "", { next: "RETRY_HERE" })), false);
  assert.equal(mayRetry(undefined), false);
  assert.equal(reasonName(UNKNOWN), "INTERNAL");
});

test("an engine whose admission is unknown takes no work", () => {
  assert.equal(takesWork({ admission: Admission.ADMISSION_OPEN }), true);
  assert.equal(takesWork({ admission: UNKNOWN }), false);
  assert.equal(takesWork(undefined), false);
});

test("durations are milliseconds", () => {
  assert.deepEqual(duration(2_500), { seconds: 2, nanos: 500_000_000 });
  assert.deepEqual(duration(-1_500), { seconds: -1, nanos: -500_000_000 });
  assert.equal(milliseconds({ seconds: 2, nanos: 1_000_000 }), 2_001);
  assert.equal(milliseconds(undefined), 0);
  assert.throws(() => duration(NaN), RangeError);
});

test("durations have Protobuf's JSON form", () => {
  const forms: [number, number, string][] = [
    [0, 0, "0s"],
    [3, 0, "3s"],
    [2, 500_000_000, "2.500s"],
    [3, 1_000, "3.000001s"],
    [3, 1, "3.000000001s"],
    [0, -500_000_000, "-0.500s"],
    [-2, -10_000_000, "-2.010s"],
  ];
  for (const [seconds, nanos, text] of forms) {
    assert.equal(durationToJson({ seconds, nanos }), text);
    assert.deepEqual(durationFromJson(text), { seconds, nanos });
  }
  for (const text of ["3", "s", "1.s", "", undefined]) assert.throws(() => durationFromJson(text), TypeError);
});

test("an intent has Protobuf's JSON form", () => {
  const transferKey = Buffer.from("00112233445566778899aabbccddeeff", "hex");
  const intent = {
    transferKey,
    requestId: 'réq "2"',
    mode: TransferMode.TRANSFER_MODE_PUSH,
    consumerCount: 3,
    ttl: duration(2_500),
    priority: -5,
    onAbort: OnAbort.ON_ABORT_KEEP,
    peer: { address: "10.0.0.7:50051", engineId: "prefill-0" },
    firmTtl: duration(500),
    requestTimeUs: 1_700_000_000_000_000,
  };
  const json = {
    transferKey: "ABEiM0RVZneImaq7zN3u/w==",
    requestId: 'réq "2"',
    mode: "TRANSFER_MODE_PUSH",
    consumerCount: 3,
    ttl: "2.500s",
    priority: -5,
    onAbort: "ON_ABORT_KEEP",
    peer: { address: "10.0.0.7:50051", engineId: "prefill-0" },
    firmTtl: "0.500s",
    requestTimeUs: 1_700_000_000_000_000,
  };
  assert.deepEqual(intentToJson(intent), json);
  const { transferKey: key, ...rest } = intentFromJson({ ...json, transferKey: "ABEiM0RVZneImaq7zN3u_w" });
  assert.equal(Buffer.from(key).toString("hex"), "00112233445566778899aabbccddeeff");
  assert.deepEqual(rest, (({ transferKey: _, ...others }) => others)(intent));
  assert.deepEqual(intentFromJson({ firm_ttl: "3s" }).firmTtl, duration(3_000));
});

test("no stream is retried by gRPC, nor ConnectPeer", () => {
  const methods = SERVICE_CONFIG.methodConfig[1]!.name.map((name) => ("method" in name ? name.method : ""));
  const streams = ["KeepAlive", "Schedule", "StreamCalls", "WatchEngine", "WatchTransfers"];
  assert.deepEqual(methods.sort(), ["ConnectPeer", ...streams]);
});

test("the code generated for leads and ranks compiles", () => {
  const empty = OpenAccessRequest.create();
  assert.deepEqual(OpenAccessRequest.decode(OpenAccessRequest.encode(empty).finish()), empty);
  assert(Object.keys(RankServiceService).length > 0);
  assert(Object.keys(rank).length > 0 && Object.keys(session).length > 0);
});
