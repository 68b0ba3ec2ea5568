// A stream of messages from the server, and to it where the method takes one.

import {
  Metadata,
  status,
  type ClientDuplexStream,
  type ClientReadableStream,
  type StatusObject,
} from "@grpc/grpc-js";
import { fromStatus, type Called, type KvGrpcError } from "./errors.js";

type Call<Request, Response> = ClientReadableStream<Response> | ClientDuplexStream<Request, Response>;

/**
 * Read it with `for await`, or message by message with `next`. Leaving the loop cancels the call.
 *
 * What was read ahead is given before the status is told, also of a call that failed. gRPC for Node reads some 16
 * messages ahead and drops what came after them when a call fails.
 */
export class Stream<Request, Response> implements AsyncIterable<Response> {
  /** The server's initial metadata; rejects when the call fails before it is there. */
  readonly initialMetadata: Promise<Metadata>;
  /** Resolves when the call is over, well or not. */
  readonly ended: Promise<void>;
  private status: StatusObject | undefined;
  private aborted: AbortSignal | undefined;

  constructor(
    private readonly call: Call<Request, Response>,
    private readonly called: Called,
    signal?: AbortSignal,
  ) {
    const onAbort = () => {
      this.aborted = signal;
      call.cancel();
    };
    if (signal?.aborted) onAbort();
    else signal?.addEventListener("abort", onAbort, { once: true });
    this.ended = new Promise((resolve) => {
      call.once("status", (ended: StatusObject) => {
        this.status = ended;
        signal?.removeEventListener("abort", onAbort);
        resolve();
      });
    });
    // The status says the same; without a listener it would end the process.
    call.on("error", () => {});
    this.initialMetadata = new Promise((resolve, reject) => {
      call.once("metadata", resolve);
      void this.ended.then(() => {
        const error = this.failure();
        if (error) reject(error);
        else resolve(new Metadata());
      });
    });
    this.initialMetadata.catch(() => {}); // also where nobody asks for it
  }

  /** The next message; undefined after a status of OK. Throws KvGrpcError after another one. */
  async next(): Promise<Response | undefined> {
    for (;;) {
      const message = this.call.read() as Response | null;
      if (message !== null) return message;
      if (this.status) break;
      await this.moreToRead();
    }
    const error = this.failure();
    if (error) throw error;
    return undefined;
  }

  /** Sends a message; resolves when it may be followed by another, or when the call has ended. */
  async send(request: Request): Promise<void> {
    const call = this.call as ClientDuplexStream<Request, Response>;
    await Promise.race([this.ended, new Promise<void>((resolve) => call.write(request, () => resolve()))]);
  }

  /** No message of the client follows. */
  finish(): void {
    (this.call as ClientDuplexStream<Request, Response>).end();
  }

  cancel(): void {
    this.call.cancel();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Response, void, void> {
    try {
      for (;;) {
        const message = await this.next();
        if (message === undefined) return;
        yield message;
      }
    } finally {
      this.cancel();
    }
  }

  private async moreToRead(): Promise<void> {
    let wake = () => {};
    const readable = new Promise<void>((resolve) => (wake = resolve));
    this.call.once("readable", wake);
    await Promise.race([readable, this.ended]);
    this.call.removeListener("readable", wake);
  }

  private failure(): KvGrpcError | Error | undefined {
    if (!this.status || this.status.code === status.OK) return undefined;
    if (this.aborted) return this.aborted.reason as Error;
    return fromStatus(this.status, this.called);
  }
}
