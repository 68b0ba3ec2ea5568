// kvgrpc: a client that moves KV-cache blocks between LLM engines.
//
// The messages, enums and service definitions are generated from the schema. Its comments are the contract.

export * from "../gen/google/protobuf/duration.js";
export * from "../gen/kvgrpc/v1/admin.js";
export * from "../gen/kvgrpc/v1/common.js";
export * from "../gen/kvgrpc/v1/fleet.js";
export * from "../gen/kvgrpc/v1/handoff.js";
export * from "../gen/kvgrpc/v1/handshake.js";
export * from "../gen/kvgrpc/v1/lease.js";
export * from "../gen/kvgrpc/v1/pool.js";
export * from "../gen/kvgrpc/v1/pool_types.js";
export * from "../gen/kvgrpc/v1/scheduler.js";
export * from "../gen/kvgrpc/v1/tensor.js";
export * from "../gen/kvgrpc/v1/transfer.js";

export type { CallOptions, Method } from "./caller.js";
export { CHANNEL_OPTIONS, SERVICE_CONFIG } from "./channel.js";
export { cleanUp, type CleanedSide, type CleanUpOptions, type Side as CleanUpSide } from "./clean-up.js";
export { Client, connect, type ConnectOptions } from "./client.js";
export { tlsCredentials, type TlsFiles } from "./credentials.js";
export { duration, durationFromJson, durationToJson, milliseconds } from "./durations.js";
export * from "./enums.js";
export { fromStatus, KvGrpcError, type Next, type Reason, type Violation } from "./errors.js";
export { HeldLease, type AnyLease, type LeaseEnd } from "./held-lease.js";
export { intentFromJson, intentToJson } from "./intent-json.js";
export { Keeper, type KeepAliveOptions } from "./keeper.js";
export { checkTransfer, move, type EndOptions, type Moved, type MoveOptions } from "./move.js";
export { redacted } from "./redacted.js";
export type { Partially, Service, Services } from "./services.js";
export { Steps, type StepOptions } from "./steps.js";
export { Stream } from "./stream.js";
export type { Waited, WaitOptions } from "./wait.js";
export type { Position, WatchOptions } from "./watch.js";
export type { EngineNews, WatchEngineOptions } from "./watch-engine.js";
