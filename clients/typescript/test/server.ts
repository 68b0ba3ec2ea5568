// A server in this process that plays a kvgrpc server: the generated services, and handlers of a test.

import { BinaryWriter } from "@bufbuild/protobuf/wire";
import {
  Metadata,
  Server,
  ServerCredentials,
  status,
  type ServerDuplexStream,
  type ServerUnaryCall,
  type ServerWritableStream,
  type ServiceDefinition,
  type UntypedHandleCall,
} from "@grpc/grpc-js";
import type { TestContext } from "node:test";
import * as kvgrpc from "kvgrpc";
import { connect, type Client, type ConnectOptions } from "kvgrpc";

export type Call<Request> = ServerUnaryCall<Request, unknown>;
export type Writing<Request, Response> = ServerWritableStream<Request, Response>;
export type Talking<Request, Response> = ServerDuplexStream<Request, Response>;

const SERVICES = {
  admin: kvgrpc.AdminServiceService,
  handoff: kvgrpc.HandoffServiceService,
  handshake: kvgrpc.HandshakeServiceService,
  leases: kvgrpc.LeaseServiceService,
  pool: kvgrpc.PoolServiceService,
  scheduler: kvgrpc.SchedulerServiceService,
  tensors: kvgrpc.TensorServiceService,
  transfers: kvgrpc.TransferServiceService,
};

/** Handlers by service and method. A unary handler returns its reply, or throws a `refusal`. */
export type Handlers = { [Service in keyof typeof SERVICES]?: Record<string, (call: any) => unknown> };

export interface TestServer {
  address: string;
  port: number;
  /** Cuts all connections and stops listening. */
  stop(): void;
}

/** Listens on 127.0.0.1 until the test is over. */
export async function serve(t: TestContext, handlers: Handlers, port = 0): Promise<TestServer> {
  const server = new Server();
  for (const [name, methods] of Object.entries(handlers) as [keyof typeof SERVICES, Record<string, any>][]) {
    const definition = SERVICES[name] as ServiceDefinition;
    const implementation: Record<string, UntypedHandleCall> = {};
    for (const [method, handler] of Object.entries(methods)) {
      const streams = definition[method]!.responseStream;
      implementation[method] = streams ? handler : unary(responseType(definition[method]!.path), handler);
    }
    server.addService(definition, implementation);
  }
  const bound = await new Promise<number>((resolve, reject) => {
    const done = (error: Error | null, found: number) => (error ? reject(error) : resolve(found));
    server.bindAsync(`127.0.0.1:${port}`, ServerCredentials.createInsecure(), done);
  });
  t.after(() => server.forceShutdown());
  return { address: `127.0.0.1:${bound}`, port: bound, stop: () => server.forceShutdown() };
}

/** Returns a client that is closed when the test is over. */
export function client(t: TestContext, server: TestServer, options: ConnectOptions = {}): Client {
  const made = connect(server.address, options);
  t.after(() => made.close());
  return made;
}

function unary(type: { fromPartial(fields: object): object }, handler: (call: unknown) => unknown) {
  return (call: unknown, callback: (error: object | null, reply?: object) => void) => {
    Promise.resolve()
      .then(() => handler(call))
      .then(
        (reply) => callback(null, type.fromPartial(reply as object)),
        (error: object) => callback(error),
      );
  };
}

function responseType(path: string): { fromPartial(fields: object): object } {
  return (kvgrpc as unknown as Record<string, { fromPartial(fields: object): object }>)[
    `${path.split("/").at(-1)}Response`
  ]!;
}

interface RefusalDetails {
  domain?: string;
  reason?: string;
  metadata?: Record<string, string>;
  violations?: { field: string; description: string }[];
  retryDelay?: kvgrpc.Duration;
}

/** Returns a status with details, as a server sends it. */
export function refusal(code: status, message: string, details?: RefusalDetails) {
  const metadata = new Metadata();
  if (details) metadata.set("grpc-status-details-bin", Buffer.from(richStatus(code, message, details)));
  return Object.assign(new Error(message), { code, details: message, metadata });
}

/** Ends a stream with an error. */
export function fail(call: { emit(event: "error", error: Error): boolean }, code: status, details?: RefusalDetails) {
  call.emit("error", refusal(code, status[code], details));
}

function richStatus(code: status, message: string, details: RefusalDetails): Uint8Array {
  const writer = new BinaryWriter().uint32(8).int32(code).uint32(18).string(message);
  const { domain = "kvgrpc.dev", reason, metadata, violations, retryDelay } = details;
  if (reason !== undefined) {
    const info = new BinaryWriter().uint32(10).string(reason).uint32(18).string(domain);
    for (const [key, value] of Object.entries(metadata ?? {})) {
      info.uint32(26).fork().uint32(10).string(key).uint32(18).string(value).join();
    }
    any(writer, "google.rpc.ErrorInfo", info.finish());
  }
  if (violations) {
    const bad = new BinaryWriter();
    for (const { field, description } of violations) {
      bad.uint32(10).fork().uint32(10).string(field).uint32(18).string(description).join();
    }
    any(writer, "google.rpc.BadRequest", bad.finish());
  }
  if (retryDelay) {
    const info = new BinaryWriter().uint32(10).bytes(kvgrpc.Duration.encode(retryDelay).finish());
    any(writer, "google.rpc.RetryInfo", info.finish());
  }
  return writer.finish();
}

function any(writer: BinaryWriter, type: string, value: Uint8Array): void {
  const inner = new BinaryWriter().uint32(10).string(`type.googleapis.com/${type}`).uint32(18).bytes(value);
  writer.uint32(26).bytes(inner.finish());
}

/** Values that a handler gets and a test waits for, in order. */
export class Inbox<T> {
  private readonly values: T[] = [];
  private readonly takers: ((value: T) => void)[] = [];

  put(value: T): void {
    const taker = this.takers.shift();
    if (taker) taker(value);
    else this.values.push(value);
  }

  take(): Promise<T> {
    const value = this.values.shift();
    return value === undefined ? new Promise((resolve) => this.takers.push(resolve)) : Promise.resolve(value);
  }
}
