// One call with its deadline, metadata, idempotency key and typed error. All calls of the library go through here.

import { randomUUID } from "node:crypto";
import { Metadata, status, type CallOptions as GrpcCallOptions, type Client as GrpcClient } from "@grpc/grpc-js";
import type { Duration } from "../gen/google/protobuf/duration.js";
import type { TransferWait } from "../gen/kvgrpc/v1/transfer.js";
import { milliseconds } from "./durations.js";
import { fromStatus, KvGrpcError, type Called } from "./errors.js";
import { notBegun } from "./retryable.js";
import { Stream } from "./stream.js";

/** A method of the generated services. */
export interface Method<Request, Response> {
  path: string;
  requestStream: boolean;
  responseStream: boolean;
  requestSerialize: (value: Request) => Buffer;
  responseDeserialize: (value: Buffer) => Response;
}

/** Options of one call. */
export interface CallOptions {
  /** Deadline in milliseconds, retries included. It replaces the default of the method. */
  timeoutMs?: number;
  /** Ends the call; the call then throws the signal's reason. */
  signal?: AbortSignal;
  /** Metadata of the call, in addition to the client's own. */
  metadata?: Record<string, string>;
  /** W3C trace context of the request that the call belongs to. */
  traceparent?: string;
  /**
   * Waits for a connection, up to the deadline. Otherwise the call fails with UNAVAILABLE while there is no connection.
   */
  waitForReady?: boolean;
}

/** Options of all calls of a client. */
export interface CallDefaults {
  /** Address of the server, for errors. */
  address: string;
  timeoutMs: number;
  metadata: Record<string, string>;
  /** Returns the authorization of a call; undefined for none. */
  authorization: () => string | undefined;
  /** Returns the trace context of a call that states none. */
  traceparent: () => string | undefined;
}

/** Longest time in milliseconds that a server holds a waiting call. */
const LONGEST_WAIT_MS = 60_000;
/**
 * Default wait of PutTensor in milliseconds. PutTensor returns when its consumers have the tensor. Without a timeout in
 * the request the server waits two minutes. A stated timeout is limited to the longest life of a lease.
 */
const PUT_TENSOR_MS = 120_000;
const LONGEST_PUT_TENSOR_MS = 600_000;

/** Maximum number of repeats of a call that a server which ends has not begun. */
const NOT_BEGUN_REPEATS = 2;

interface Waiting {
  timeout?: Duration;
  wait?: Duration | TransferWait;
}

/** Milliseconds that a waiting method needs in addition to the time of any call. */
const WAITS: Record<string, (request: Waiting) => number> = {
  "/kvgrpc.v1.HandoffService/PullBlocks": (request) => inCallMs(request.wait as TransferWait | undefined),
  "/kvgrpc.v1.HandoffService/ReserveBlocks": (request) => inCallMs(request.wait as TransferWait | undefined),
  "/kvgrpc.v1.TransferService/WaitTransfer": (request) => waitMs(request.timeout, LONGEST_WAIT_MS),
  "/kvgrpc.v1.TransferService/WaitTransfers": (request) => waitMs(request.timeout, LONGEST_WAIT_MS),
  "/kvgrpc.v1.SchedulerService/PollSchedulerNews": (request) => waitMs(request.wait as Duration | undefined, 0),
  "/kvgrpc.v1.TensorService/GetTensor": (request) => waitMs(request.timeout, LONGEST_WAIT_MS),
  "/kvgrpc.v1.TensorService/PutTensor": (request) => waitMs(request.timeout, PUT_TENSOR_MS, LONGEST_PUT_TENSOR_MS),
};

/** Calls that wait for two servers to get to know each other, or for transfers in flight to end. */
const LONG_CALLS = new Set([
  "/kvgrpc.v1.HandshakeService/ConnectPeer",
  "/kvgrpc.v1.AdminService/ReleaseQuarantine",
]);
const LONG_CALL_MS = 60_000;

export class Caller {
  private readonly streams = new Set<Stream<never, unknown>>();
  private readonly lasting = new Set<AbortController>();
  private closed = false;

  constructor(
    private readonly client: GrpcClient,
    private readonly defaults: CallDefaults,
  ) {}

  /** Makes a unary call. */
  async unary<Request, Response>(
    method: Method<Request, Response>,
    request: Request,
    options: CallOptions = {},
  ): Promise<Response> {
    this.check(options.signal);
    const idempotencyKey = setIdempotencyKey(request as Record<string, unknown>);
    const until = deadline(options.timeoutMs ?? this.timeoutMs(method.path, request as object));
    const called = { ...this.called(method), idempotencyKey };
    for (let repeats = 0; ; repeats++) {
      try {
        return await this.once(method, request, options, until, called);
      } catch (error) {
        const ended = this.closed || options.signal?.aborted;
        if (ended || repeats === NOT_BEGUN_REPEATS || !notBegun(error)) throw error;
      }
    }
  }

  private once<Request, Response>(
    method: Method<Request, Response>,
    request: Request,
    options: CallOptions,
    until: GrpcCallOptions,
    called: Called,
  ): Promise<Response> {
    const { signal } = options;
    return new Promise((resolve, reject) => {
      const abort = () => call.cancel();
      const call = this.client.makeUnaryRequest(
        method.path,
        method.requestSerialize,
        method.responseDeserialize,
        request,
        this.metadata(options),
        until,
        (failed, response) => {
          signal?.removeEventListener("abort", abort);
          if (!failed) resolve(response!);
          else reject(signal?.aborted ? signal.reason : fromStatus(failed, called));
        },
      );
      signal?.addEventListener("abort", abort, { once: true });
    });
  }

  /** Opens a stream. It has no deadline unless one is stated; keepalive detects a dead connection. */
  stream<Request, Response>(
    method: Method<Request, Response>,
    request: Request | undefined,
    options: CallOptions = {},
  ): Stream<Request, Response> {
    this.check(options.signal);
    const { path, requestSerialize, responseDeserialize } = method;
    const metadata = this.metadata(options);
    const grpcOptions = options.timeoutMs === undefined ? {} : deadline(options.timeoutMs);
    if (method.requestStream) {
      const call = this.client.makeBidiStreamRequest(path, requestSerialize, responseDeserialize, metadata, grpcOptions);
      return this.track(new Stream(call, this.called(method), options.signal));
    }
    if (request === undefined) throw new TypeError(`${path} takes one request`);
    const call = this.client.makeServerStreamRequest(
      path,
      requestSerialize,
      responseDeserialize,
      request,
      metadata,
      grpcOptions,
    );
    return this.track(new Stream(call, this.called(method), options.signal));
  }

  /**
   * Runs a function that makes calls and pauses for longer than one call lasts. The signal of the function aborts with
   * the caller's signal, when the client is closed, and with a reason that the function gives to `end`.
   */
  async last<T>(
    signal: AbortSignal | undefined,
    run: (signal: AbortSignal, end: (reason: Error) => void) => Promise<T>,
  ): Promise<T> {
    this.check(signal);
    const ending = new AbortController();
    const abort = () => ending.abort(signal!.reason);
    signal?.addEventListener("abort", abort, { once: true });
    this.lasting.add(ending);
    try {
      return await run(ending.signal, (reason) => ending.abort(reason));
    } finally {
      signal?.removeEventListener("abort", abort);
      this.lasting.delete(ending);
    }
  }

  /** Runs a function like `last`, within the deadline of a call. The signal then aborts with DEADLINE_EXCEEDED. */
  async within<T>(
    method: { path: string },
    { timeoutMs = this.defaults.timeoutMs, signal }: Pick<CallOptions, "timeoutMs" | "signal">,
    run: (signal: AbortSignal) => Promise<T>,
  ): Promise<T> {
    checkTimeout(timeoutMs);
    const message = `no answer within ${timeoutMs} ms`;
    const late = () => new KvGrpcError(status.DEADLINE_EXCEEDED, message, this.called(method));
    return this.last(signal, async (ending, end) => {
      const timer = setTimeout(() => end(late()), timeoutMs);
      try {
        return await run(ending);
      } finally {
        clearTimeout(timer);
      }
    });
  }

  /** Returns the W3C trace context of a call with these options; undefined or empty without one. */
  traceparent(options: Pick<CallOptions, "traceparent">): string | undefined {
    return options.traceparent ?? this.defaults.traceparent();
  }

  /** Ends all streams and waits. The readers of the streams do not open others. */
  close(): void {
    this.closed = true;
    for (const ending of this.lasting) ending.abort(closedError());
    for (const stream of this.streams) stream.cancel();
    this.client.close();
  }

  private track<Request, Response>(stream: Stream<Request, Response>): Stream<Request, Response> {
    this.streams.add(stream);
    void stream.ended.then(() => this.streams.delete(stream));
    return stream;
  }

  private check(signal: AbortSignal | undefined): void {
    signal?.throwIfAborted();
    if (this.closed) throw closedError();
  }

  private called({ path }: { path: string }): Called {
    return { method: path.replace("/kvgrpc.v1.", ""), address: this.defaults.address };
  }

  private timeoutMs(path: string, request: object): number {
    if (LONG_CALLS.has(path)) return Math.max(LONG_CALL_MS, this.defaults.timeoutMs);
    return this.defaults.timeoutMs + (WAITS[path]?.(request) ?? 0);
  }

  private metadata(options: CallOptions): Metadata {
    const metadata = new Metadata({ waitForReady: options.waitForReady ?? false });
    const authorization = this.defaults.authorization();
    if (authorization !== undefined) metadata.set("authorization", authorization);
    for (const [key, value] of Object.entries({ ...this.defaults.metadata, ...options.metadata })) {
      metadata.set(key, value);
    }
    const traceparent = this.traceparent(options);
    if (traceparent) metadata.set("traceparent", traceparent);
    return metadata;
  }
}

function closedError(): Error {
  return new Error("the client is closed");
}

function checkTimeout(timeoutMs: number): void {
  if (!(timeoutMs > 0 && Number.isFinite(timeoutMs))) {
    throw new RangeError(`a timeout is a positive number of milliseconds, not ${timeoutMs}`);
  }
}

function deadline(timeoutMs: number): GrpcCallOptions {
  checkTimeout(timeoutMs);
  return { deadline: new Date(Date.now() + timeoutMs) };
}

/**
 * Returns the key of a request that has one. It is set once for a call, because gRPC's own retries send the same bytes.
 */
function setIdempotencyKey(request: Record<string, unknown>): string | undefined {
  if (request.idempotencyKey === "") request.idempotencyKey = randomUUID();
  return request.idempotencyKey as string | undefined;
}

function inCallMs(wait: TransferWait | undefined): number {
  return wait ? waitMs(wait.timeout, LONGEST_WAIT_MS) : 0;
}

function waitMs(asked: Duration | undefined, unset: number, most = LONGEST_WAIT_MS): number {
  return asked ? Math.min(Math.max(milliseconds(asked), 0), most) : unset;
}
