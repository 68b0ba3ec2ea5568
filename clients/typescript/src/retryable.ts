// Which ends of a stream or a wait are worth another attempt.

import { status } from "@grpc/grpc-js";
import { KvGrpcError } from "./errors.js";

/** The server is away, or too busy for the moment. */
const PASSING = new Set([status.UNAVAILABLE, status.RESOURCE_EXHAUSTED, status.DEADLINE_EXCEEDED]);

/** Also how transports and proxies tell of a broken connection. From a kvgrpc server, with details, they are final. */
const BROKEN = new Set([status.CANCELLED, status.UNKNOWN, status.INTERNAL, status.ABORTED]);

/** What gRPC itself says of a message that is longer than its reader takes: the same message comes again. */
const TOO_LARGE = "larger than max";

/** The error if another attempt may succeed; else it is thrown. */
export function passing(error: unknown): KvGrpcError {
  if (error instanceof KvGrpcError && !(error.reason === "UNSPECIFIED" && error.message.includes(TOO_LARGE))) {
    if (PASSING.has(error.code)) return error;
    if (error.reason === "UNSPECIFIED" && BROKEN.has(error.code)) return error;
  }
  throw error;
}

/** What a stream that a server ended without an error counts as. */
export function endedStream(what: string): KvGrpcError {
  return new KvGrpcError(status.UNAVAILABLE, `the server ended ${what}`);
}
