// The ends of a stream or a wait that are worth another attempt.

import { status } from "@grpc/grpc-js";
import { KvGrpcError } from "./errors.js";

/** Codes of a server that is away or too busy for the moment. */
const PASSING = new Set([status.UNAVAILABLE, status.RESOURCE_EXHAUSTED, status.DEADLINE_EXCEEDED]);

/**
 * Codes with which transports and proxies report a broken connection. From a kvgrpc server, with details, they are
 * final.
 */
const BROKEN = new Set([status.CANCELLED, status.UNKNOWN, status.INTERNAL, status.ABORTED]);

/** Part of gRPC's error text for a message over the reader's size limit. The same message would come again. */
const TOO_LARGE = "larger than max";

/** Returns the error if another attempt may succeed, and throws it otherwise. */
export function passing(error: unknown): KvGrpcError {
  if (error instanceof KvGrpcError && !(error.reason === "UNSPECIFIED" && error.message.includes(TOO_LARGE))) {
    if (PASSING.has(error.code)) return error;
    if (error.reason === "UNSPECIFIED" && BROKEN.has(error.code)) return error;
  }
  throw error;
}

/**
 * Returns whether a server may have received a call and not begun it when it ended: gRPC ends such a call with CANCELLED
 * and no reason.
 */
export function notBegun(error: unknown): boolean {
  return error instanceof KvGrpcError && error.code === status.CANCELLED && error.reason === "UNSPECIFIED";
}

/** Returns the error of a stream that a server ended without an error. */
export function endedStream(what: string): KvGrpcError {
  return new KvGrpcError(status.UNAVAILABLE, `the server ended ${what}`);
}
