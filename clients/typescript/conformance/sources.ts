// The sources that `next` reads from: a raw stream, or a watch of the wrapper.

import { status } from "@grpc/grpc-js";
import { KvGrpcError, type Stream } from "kvgrpc";

type Json = Record<string, unknown>;

export interface Source {
  next(timeoutMs: number): Promise<Json>;
  send(request: Json): Promise<void>;
  finish(): void;
  cancel(): void;
}

/**
 * Reads one message after the other. A message that comes after a timeout is the answer to the next call. The end and
 * an error are the answer to all later calls.
 */
class Reader {
  private pending: Promise<Json> | undefined;

  constructor(private readonly read: () => Promise<Json>) {}

  /** Reads ahead. `next` reports a failure. */
  start(): Promise<Json> {
    if (!this.pending) {
      this.pending = this.read();
      this.pending.catch(() => {});
    }
    return this.pending;
  }

  async next(timeoutMs: number): Promise<Json> {
    let timer: NodeJS.Timeout | undefined;
    const over = new Promise<undefined>((resolve) => (timer = setTimeout(() => resolve(undefined), timeoutMs)));
    try {
      const answer = await Promise.race([this.start(), over]);
      if (answer?.message) this.pending = undefined;
      return answer ?? { timeout: true };
    } finally {
      clearTimeout(timer);
    }
  }
}

export function streamSource(
  stream: Stream<object, object>,
  toJson: (message: object) => Json,
  fromJson: (json: Json) => object,
): Source {
  const reader = new Reader(async () => {
    const message = await stream.next();
    return message === undefined ? { end: true } : { message: toJson(message) };
  });
  return {
    next: (timeoutMs) => reader.next(timeoutMs),
    send: (request) => stream.send(fromJson(request)),
    finish: () => stream.finish(),
    cancel: () => stream.cancel(),
  };
}

/** Starts reading at once, as a user's loop would. */
export function iteratorSource<Message>(
  messages: AsyncGenerator<Message>,
  stop: AbortController,
  toJson: (message: Message) => Json,
): Source {
  const reader = new Reader(async () => {
    const { done, value } = await messages.next();
    return done ? { end: true } : { message: toJson(value as Message) };
  });
  void reader.start();
  const onlyReads = () => {
    throw new TypeError("nothing can be sent here");
  };
  return {
    next: (timeoutMs) => reader.next(timeoutMs),
    send: async () => onlyReads(),
    finish: onlyReads,
    cancel: () => stop.abort(new KvGrpcError(status.CANCELLED, "cancelled by the caller")),
  };
}
