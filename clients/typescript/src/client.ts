// The client of one server.

import { credentials as grpcCredentials, Client as GrpcClient } from "@grpc/grpc-js";
import type { ChannelCredentials, ChannelOptions } from "@grpc/grpc-js";
import type { PullBlocksRequest, ReserveBlocksRequest } from "../gen/kvgrpc/v1/handoff.js";
import type { Transfer, WatchTransfersResponse } from "../gen/kvgrpc/v1/transfer.js";
import { Caller, type CallOptions, type Method } from "./caller.js";
import { CHANNEL_OPTIONS } from "./channel.js";
import { BearerToken, tlsCredentials, type TlsFiles } from "./credentials.js";
import type { AnyLease } from "./held-lease.js";
import { Keeper, type KeepAliveOptions } from "./keeper.js";
import { pull, receive, type EndOptions } from "./move.js";
import { services, type Partially, type Services } from "./services.js";
import { Steps } from "./steps.js";
import type { Stream } from "./stream.js";
import { wait, type Waited, type WaitOptions } from "./wait.js";
import { watch, type WatchOptions } from "./watch.js";
import { watchEngine, type EngineNews, type WatchEngineOptions } from "./watch-engine.js";

const TIMEOUT_MS = 10_000;

export interface ConnectOptions {
  /** Credentials of the channel. Without them and without `tls` the connection is not encrypted. */
  credentials?: ChannelCredentials;
  /** Files of TLS, in place of `credentials`. They are read again for each new connection. */
  tls?: TlsFiles;
  /** Bearer token that every call carries. */
  token?: string;
  /** Path of a file with the token, in place of `token`. The file is read again once a second. */
  tokenFile?: string;
  /**
   * Deadline in milliseconds of a unary call that states none; 10,000 by default. The wait of a waiting call is added.
   */
  timeoutMs?: number;
  /** Metadata of every call. */
  metadata?: Record<string, string>;
  /** W3C trace context of every call that states none, or a function that returns the current one. */
  traceparent?: string | (() => string | undefined);
  /** Channel options of gRPC, which override those of this library. */
  channelOptions?: ChannelOptions;
}

/** Returns a client of the server at `address` (`host:port`). It sends nothing before the first call. */
export function connect(address: string, options: ConnectOptions = {}): Client {
  return new Client(address, options);
}

/** The client of one server. Any number of calls may run at once. */
export class Client implements Services {
  /** The gRPC client, for services and methods that have no method here. */
  readonly grpc: GrpcClient;
  readonly admin: Services["admin"];
  readonly fleet: Services["fleet"];
  readonly handoff: Services["handoff"];
  readonly handshake: Services["handshake"];
  readonly leases: Services["leases"];
  readonly pool: Services["pool"];
  readonly scheduler: Services["scheduler"];
  readonly tensors: Services["tensors"];
  readonly transfers: Services["transfers"];
  private readonly caller: Caller;
  private readonly keepers = new Set<Keeper>();

  constructor(
    readonly address: string,
    options: ConnectOptions = {},
  ) {
    const { tls, traceparent } = options;
    if (tls && options.credentials) throw new Error("files of TLS and credentials are both given");
    const credentials = tls ? tlsCredentials(tls) : (options.credentials ?? grpcCredentials.createInsecure());
    const token = new BearerToken(options.token, options.tokenFile);
    this.grpc = new GrpcClient(address, credentials, { ...CHANNEL_OPTIONS, ...options.channelOptions });
    this.caller = new Caller(this.grpc, {
      address,
      timeoutMs: options.timeoutMs ?? TIMEOUT_MS,
      metadata: options.metadata ?? {},
      authorization: () => token.header(),
      traceparent: typeof traceparent === "function" ? traceparent : () => traceparent,
    });
    const { admin, fleet, handoff, handshake, leases, pool, scheduler, tensors, transfers } = services(this.caller);
    this.admin = admin;
    this.fleet = fleet;
    this.handoff = handoff;
    this.handshake = handshake;
    this.leases = leases;
    this.pool = pool;
    this.scheduler = scheduler;
    this.tensors = tensors;
    this.transfers = transfers;
  }

  /** Waits for a transfer; see WaitOptions. */
  wait(transferId: string, options?: WaitOptions): Promise<Waited> {
    return wait(this.caller, transferId, options);
  }

  /**
   * Makes a pull whose destination is stated, and waits for its end. It returns the transfer once the KV is in its
   * blocks. Any other end throws as checkTransfer does. When the time is over, it throws DEADLINE_EXCEEDED: then the
   * transfer continues, and cancelTransfer ends it. State `wait.until` to wait for the return of the memory as well.
   */
  pull(request: Partially<PullBlocksRequest>, options?: EndOptions): Promise<Transfer> {
    return pull(this, request, options);
  }

  /** Reserves blocks for what the request's source will push, and waits for it as pull does. */
  receive(request: Partially<ReserveBlocksRequest>, options?: EndOptions): Promise<Transfer> {
    return receive(this, request, options);
  }

  /** Yields every change of transfers, and resumes by itself. */
  watch(options?: WatchOptions): AsyncGenerator<WatchTransfersResponse, void, void> {
    return watch(this.caller, options);
  }

  /** Yields the status of the engine, or that it cannot be reached, and reconnects by itself. */
  watchEngine(options?: WatchEngineOptions): AsyncGenerator<EngineNews, void, void> {
    return watchEngine(this.caller, options);
  }

  /** Renews leases until they are over or the keeper is closed. */
  keepAlive(leases: readonly AnyLease[], options: KeepAliveOptions = {}): Keeper {
    const keeper = new Keeper(this.caller, leases, options, () => this.keepers.delete(keeper));
    this.keepers.add(keeper);
    return keeper;
  }

  /** Sends the steps of a scheduler over one stream, which opens again when it is lost. `metadata` is the stream's. */
  steps(metadata: Record<string, string> = {}): Steps {
    return new Steps(this.caller, metadata);
  }

  /** Opens a stream that does not resume: `client.stream(SchedulerServiceService.schedule)`. */
  stream<Request, Response>(
    method: Method<Request, Response>,
    request?: Request,
    options?: CallOptions,
  ): Stream<Request, Response> {
    return this.caller.stream(method, request, options);
  }

  /** Ends renewals, watches, waits and the connection. Transfers and leases continue at the server. */
  close(): void {
    for (const keeper of this.keepers) keeper.close();
    this.caller.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}
