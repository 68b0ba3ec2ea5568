// The conformance executor: carries out one JSON object a line, and judges nothing. The protocol is in
// clients/conformance/README.md.

import { createInterface } from "node:readline";
import {
  CancelOutcome,
  KvGrpcError,
  LeaseState,
  WaitCondition,
  cleanUp,
  connect,
  move,
  nameOf,
  redacted,
  type Client,
  type HandOver,
  type HeldLease,
  type Keeper,
  type LeaseRef,
  type WatchEngineResponse,
  type WatchTransfersResponse,
} from "kvgrpc";
import { fromJson, toJson } from "./json.js";
import { messageOf, methodOf, type AnyMethod } from "./methods.js";
import { iteratorSource, streamSource, type Source } from "./sources.js";

type Json = Record<string, any>;

/** A request that cannot be carried out here. */
class ExecutorError extends Error {}

const clients = new Map<string, Client>();
/** The sources with the name of their server. They end with its client. */
const sources = new Map<string, { server: string; source: Source }>();
const keepers = new Map<string, { server: string; keeper: Keeper; leases: HeldLease[] }>();

const operations: Record<string, (request: Json) => Promise<Json> | Json> = {
  hello: () => ({ language: "typescript", version: process.versions.node }),

  connect: ({ server, address, tls, token, tokenFile }) => {
    disconnect(server);
    clients.set(server, connect(address, { tls, token, tokenFile }));
    return {};
  },

  call: async ({ server, method: path, request, deadlineS, metadata }) => {
    const method = methodOf(path);
    const timeoutMs = deadlineS === undefined ? undefined : deadlineS * 1000;
    const call = unary(client(server), method);
    const reply = await call(fromJson(method.requestType, request ?? {}), { timeoutMs, metadata });
    return { reply: toJson(method.responseType, reply) };
  },

  open: async ({ server, method: path, stream: name, request, metadata }) => {
    const method = methodOf(path);
    const type = messageOf(method.requestType);
    const first = method.definition.requestStream
      ? undefined
      : type.fromPartial(fromJson(method.requestType, request ?? {}));
    const stream = client(server).stream(method.definition, first, { metadata });
    const opened = streamSource(
      stream,
      (message) => toJson(method.responseType, message),
      (json) => type.fromPartial(fromJson(method.requestType, json)),
    );
    sources.set(name, { server, source: opened });
    if (method.definition.requestStream && request) await opened.send(request);
    const initial = await stream.initialMetadata;
    return { metadata: Object.fromEntries(Object.entries(initial.getMap()).map(([k, v]) => [k, String(v)])) };
  },

  send: async ({ stream, request }) => {
    await source(stream).send(request ?? {});
    return {};
  },

  finish: ({ stream }) => {
    source(stream).finish();
    return {};
  },

  next: ({ stream, timeoutS }) => source(stream).next((timeoutS ?? 10) * 1000),

  cancel: ({ stream }) => {
    source(stream).cancel();
    return {};
  },

  wait: async ({ server, transferId, until, timeoutS }) => {
    const condition = WaitCondition[`WAIT_CONDITION_${until ?? "ENDED"}` as keyof typeof WaitCondition];
    const timeoutMs = timeoutS === undefined ? undefined : timeoutS * 1000;
    const waited = await client(server).wait(transferId, { until: condition, timeoutMs });
    return {
      transfer: toJson(".kvgrpc.v1.Transfer", waited.transfer),
      conditionMet: waited.conditionMet,
    };
  },

  pull: async ({ server, request, timeoutS }) => {
    const asked = fromJson(".kvgrpc.v1.PullBlocksRequest", request);
    const transfer = await client(server).pull(asked, { timeoutMs: timeoutS * 1000 });
    return { transfer: toJson(".kvgrpc.v1.Transfer", transfer) };
  },

  move: async ({ server, to, request, requestId, timeoutS }) => {
    const { blocks, content } = messageOf(".kvgrpc.v1.HandOver").fromPartial(
      fromJson(".kvgrpc.v1.HandOver", request),
    ) as HandOver;
    const options = { requestId, timeoutMs: timeoutS * 1000 };
    const moved = await move(client(server), client(to), blocks!, content!, options);
    return {
      transfer: toJson(".kvgrpc.v1.Transfer", moved.transfer),
      blocks: toJson(".kvgrpc.v1.Blocks", moved.blocks),
    };
  },

  redacted: ({ method: path, request }) => {
    const { requestType } = methodOf(path);
    return { text: redacted(messageOf(requestType).fromPartial(fromJson(requestType, request ?? {}))) };
  },

  watch: ({ server, stream, filter, after }) => {
    const stop = new AbortController();
    const changes = client(server).watch({
      signal: stop.signal,
      filter: filter && fromJson(".kvgrpc.v1.TransferFilter", filter),
      after: after && { eventSeq: Number(after.eventSeq ?? 0), incarnation: Number(after.incarnation ?? 0) },
    });
    const asJson = (message: WatchTransfersResponse) => toJson(".kvgrpc.v1.WatchTransfersResponse", message);
    sources.set(stream, { server, source: iteratorSource(changes, stop, asJson) });
    return {};
  },

  watchEngine: ({ server, stream }) => {
    const stop = new AbortController();
    const news = client(server).watchEngine({ signal: stop.signal });
    async function* messages(): AsyncGenerator<WatchEngineResponse> {
      for await (const { reachable, ...message } of news) if (reachable) yield message as WatchEngineResponse;
    }
    const asJson = (message: WatchEngineResponse) => toJson(".kvgrpc.v1.WatchEngineResponse", message);
    sources.set(stream, { server, source: iteratorSource(messages(), stop, asJson) });
    return {};
  },

  keepAlive: ({ server, keeper: name, leases, ttlS }) => {
    const refs = (leases as Json[]).map((lease) => fromJson(".kvgrpc.v1.LeaseRef", lease) as unknown as LeaseRef);
    const keeper = client(server).keepAlive([], { ttlMs: ttlS === undefined ? undefined : ttlS * 1000 });
    keepers.set(name, { server, keeper, leases: refs.map((ref) => keeper.add(ref)) });
    return {};
  },

  kept: async ({ keeper: name, index, timeoutS }) => {
    const lease = keepers.get(name)?.leases[index ?? 0];
    if (!lease) throw new ExecutorError(`no lease ${index} of a keeper ${name}`);
    await within(lease.over, (timeoutS ?? 0) * 1000);
    return { state: nameOf(LeaseState, "LEASE_STATE_", lease.state) ?? lease.state };
  },

  stopKeeping: ({ keeper: name }) => {
    keepers.get(name)?.keeper.close();
    return {};
  },

  cleanUp: async ({ sides, message }) => {
    const cleaned = await cleanUp(
      sides.map((side: Json) => ({
        client: client(side.server),
        transferKey: side.transferKey === undefined ? undefined : Buffer.from(side.transferKey, "base64"),
        transferId: side.transferId,
        freeAllocationIds: side.freeAllocationIds,
      })),
      { message },
    );
    return { outcomes: cleaned.map(outcomeName) };
  },

  close: ({ server }) => {
    disconnect(server);
    return {};
  },
};

function outcomeName({ outcome, error }: { outcome?: CancelOutcome; error?: KvGrpcError }): string | number {
  if (error) return error.reason === "UNSPECIFIED" ? error.codeName : error.reason;
  return nameOf(CancelOutcome, "CANCEL_OUTCOME_", outcome!) ?? outcome!;
}

function disconnect(name: string): void {
  clients.get(name)?.close();
  clients.delete(name);
  for (const owned of [sources, keepers]) {
    for (const [key, { server }] of owned) if (server === name) owned.delete(key);
  }
}

function client(name: string): Client {
  const found = clients.get(name);
  if (!found) throw new ExecutorError(`no server ${name} is connected`);
  return found;
}

function source(name: string): Source {
  const found = sources.get(name);
  if (!found) throw new ExecutorError(`no stream ${name} is open`);
  return found.source;
}

/** Returns the method of the client that makes a unary call. */
function unary(from: Client, method: AnyMethod): (request: object, options: object) => Promise<object> {
  const service = from[method.service] as unknown as Record<string, (request: object, options: object) => Promise<object>>;
  const call = service[method.name];
  if (!call) throw new ExecutorError(`${method.definition.path} is a stream`);
  return call;
}

/** Returns true once `done` resolves, and false when the time is over first. */
async function within(done: Promise<unknown>, ms: number): Promise<boolean> {
  let timer: NodeJS.Timeout | undefined;
  const over = new Promise<boolean>((resolve) => (timer = setTimeout(resolve, ms, false)));
  try {
    return await Promise.race([done.then(() => true), over]);
  } finally {
    clearTimeout(timer);
  }
}

function errorJson(error: unknown): Json {
  if (!(error instanceof KvGrpcError)) {
    return { code: "EXECUTOR", message: error instanceof Error ? error.message : String(error) };
  }
  return {
    code: error.codeName,
    reason: stated(error.reason),
    message: error.message,
    next: stated(error.next),
    engineId: error.engineId,
    incarnation: error.incarnation ? String(error.incarnation) : "",
    metadata: error.metadata,
    violations: error.violations,
    ...(error.retryDelayMs !== undefined && { retryDelayS: error.retryDelayMs / 1000 }),
  };
}

function stated(name: string): string {
  return name === "UNSPECIFIED" ? "" : name;
}

async function handle(line: string): Promise<void> {
  const { id, op, ...request } = JSON.parse(line) as Json;
  let answer: Json;
  try {
    const operation = Object.hasOwn(operations, op) ? operations[op]! : undefined;
    if (!operation) throw new ExecutorError(`unknown op ${op}`);
    answer = { id, ok: await operation(request) };
  } catch (error) {
    answer = { id, error: errorJson(error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}

const lines = createInterface({ input: process.stdin });
lines.on("line", (line) => void (line.trim() && handle(line)));
lines.on("close", () => process.exit(0));
