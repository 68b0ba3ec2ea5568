// The error of all calls, and how it is made from a gRPC status.

import { BinaryReader } from "@bufbuild/protobuf/wire";
import { status, type Metadata, type ServiceError } from "@grpc/grpc-js";
import { Duration } from "../gen/google/protobuf/duration.js";
import { FailureReason, type NextStep } from "../gen/kvgrpc/v1/common.js";
import { milliseconds } from "./durations.js";

type WithoutPrefix<Name, Prefix extends string> = Name extends `${Prefix}${infer Rest}` ? Rest : never;

/** Name of a FailureReason. A server may be newer than this library, so other names are possible. */
export type Reason = WithoutPrefix<keyof typeof FailureReason, "FAILURE_REASON_"> | (string & {});

/** Name of a NextStep: the recommended next step. */
export type Next = WithoutPrefix<keyof typeof NextStep, "NEXT_STEP_"> | (string & {});

/** A wrong field of a request. */
export interface Violation {
  field: string;
  description: string;
}

const DOMAIN = "kvgrpc.dev";
const DETAILS_KEY = "grpc-status-details-bin";

/** The call that an error belongs to. */
export interface Called {
  /** The called method: `PoolService/AllocateBlocks`. */
  method: string;
  /** The server that was called. */
  address: string;
  /** Key of the request. The same request with this key retries the call and makes no second one. */
  idempotencyKey?: string | undefined;
}

/** The details that a server states in addition to code and message, and the call. */
interface Details extends Called {
  reason: Reason;
  next: Next;
  engineId: string;
  /** Incarnation of the engine that refused; 0 where it is not stated. */
  incarnation: number;
  violations: Violation[];
  retryDelayMs: number | undefined;
  metadata: Record<string, string>;
  idempotencyKey: string;
}

const NO_DETAILS: Details = {
  reason: "UNSPECIFIED",
  next: "UNSPECIFIED",
  engineId: "",
  incarnation: 0,
  violations: [],
  retryDelayMs: undefined,
  metadata: {},
  method: "",
  address: "",
  idempotencyKey: "",
};

/**
 * The error of a failed call. Programs use `reason` and `next`; the message is for people.
 *
 * A status without details was made by gRPC or a proxy, not by a kvgrpc server. Its reason is "UNSPECIFIED".
 */
export class KvGrpcError extends Error implements Details {
  override readonly name = "KvGrpcError";
  readonly reason: Reason;
  readonly next: Next;
  readonly engineId: string;
  readonly incarnation: number;
  readonly violations: Violation[];
  readonly retryDelayMs: number | undefined;
  readonly metadata: Record<string, string>;
  readonly method: string;
  readonly address: string;
  readonly idempotencyKey: string;

  constructor(
    readonly code: status,
    message: string,
    details: Partial<Details> = {},
    options?: ErrorOptions,
  ) {
    super(message, options);
    const all = { ...NO_DETAILS, ...details };
    this.reason = all.reason;
    this.next = all.next;
    this.engineId = all.engineId;
    this.incarnation = all.incarnation;
    this.violations = all.violations;
    this.retryDelayMs = all.retryDelayMs;
    this.metadata = all.metadata;
    this.method = all.method;
    this.address = all.address;
    this.idempotencyKey = all.idempotencyKey;
  }

  /** Name of the gRPC code. */
  get codeName(): string {
    return status[this.code] ?? String(this.code);
  }
}

/** Returns the typed error of a failed call. */
export function fromStatus(
  failed: Pick<ServiceError, "code" | "details" | "metadata">,
  { method = "", address = "", idempotencyKey = "" }: Partial<Called> = {},
): KvGrpcError {
  const message = failed.details || status[failed.code] || "unknown";
  const details = { ...detailsOf(failed.metadata), method, address, idempotencyKey };
  return new KvGrpcError(failed.code, saidOnce(message, details), details, { cause: failed });
}

/** Returns the message without its reason. A server writes the reason into it for tools that show nothing else. */
function saidOnce(message: string, { reason }: Partial<Details>): string {
  return reason && message.startsWith(`${reason}: `) ? message.slice(reason.length + 2) : message;
}

function detailsOf(trailers: Metadata | undefined): Partial<Details> {
  const encoded = trailers?.get(DETAILS_KEY)[0];
  if (encoded === undefined || typeof encoded === "string") return {};
  const found: Partial<Details> = {};
  for (const row of fields(encoded)[3] ?? []) {
    const any = fields(row);
    const value = any[2]?.[0] ?? new Uint8Array();
    const type = text(any[1]).split("/").at(-1);
    if (type === "google.rpc.ErrorInfo") Object.assign(found, errorInfo(value));
    else if (type === "google.rpc.BadRequest") found.violations = violations(value);
    else if (type === "google.rpc.RetryInfo") found.retryDelayMs = retryDelayMs(value);
  }
  return found;
}

function errorInfo(encoded: Uint8Array): Partial<Details> {
  const info = fields(encoded);
  if (text(info[2]) !== DOMAIN) return {};
  const metadata: Record<string, string> = {};
  for (const row of info[3] ?? []) {
    const entry = fields(row);
    metadata[text(entry[1])] = text(entry[2]);
  }
  const reason = text(info[1]);
  return {
    reason,
    // The next step for a reason that this library does not know must not be taken, whatever it is.
    next: `FAILURE_REASON_${reason}` in FailureReason ? (metadata.next ?? NO_DETAILS.next) : NO_DETAILS.next,
    engineId: metadata.engine_id ?? "",
    incarnation: Number(metadata.incarnation ?? 0) || 0,
    metadata,
  };
}

function violations(encoded: Uint8Array): Violation[] {
  return (fields(encoded)[1] ?? []).map((row) => {
    const violation = fields(row);
    return { field: text(violation[1]), description: text(violation[2]) };
  });
}

function retryDelayMs(encoded: Uint8Array): number | undefined {
  const delay = fields(encoded)[1]?.[0];
  return delay && milliseconds(Duration.decode(delay));
}

/**
 * Returns the texts and messages of an encoded message by field number. The google.rpc messages are few and frozen, so
 * they are read by number. Whatever cannot be read is left out, because an error must not hide behind another one.
 */
function fields(encoded: Uint8Array): Record<number, Uint8Array[]> {
  const found: Record<number, Uint8Array[]> = {};
  try {
    const reader = new BinaryReader(encoded);
    while (reader.pos < reader.len) {
      const [number, wireType] = reader.tag();
      if (wireType === 2) (found[number] ??= []).push(reader.bytes());
      else reader.skip(wireType);
    }
  } catch {
    // The message is cut off or malformed. The fields before that are kept.
  }
  return found;
}

function text(values: Uint8Array[] | undefined): string {
  return new TextDecoder().decode(values?.at(-1));
}
