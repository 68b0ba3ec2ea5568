// A stream of messages from the server, and to the server where the method takes them.

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
 * A stream that is read with `for await`, or message by message with `next`. Leaving the loop cancels the call.
 *
 * Messages that were read ahead are returned before the status, even when the call failed. gRPC for Node reads about 16
 * messages ahead and drops the later ones when a call fails.
 */
export class Stream<Request, Response> implements AsyncIterable<Response> {
  /** The server's initial metadata; rejects when the call fails before the metadata is there. */
  readonly initialMetadata: Promise<Metadata>;
  /** Resolves when the call is over, with success or not. */
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
    // The status reports the same error. Without a listener the error would end the process.
    call.on("error", () => {});
    this.initialMetadata = new Promise((resolve, reject) => {
      call.once("metadata", resolve);
      void this.ended.then(() => {
        const error = this.failure();
        if (error) reject(error);
        else resolve(new Metadata());
      });
    });
    this.initialMetadata.catch(() => {}); // keeps the rejection from being unhandled where nobody asks
  }

  /** Returns the next message; undefined after a status of OK. Throws KvGrpcError after another status. */
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

  /** Sends a message; resolves when another one may follow, or when the call has ended. */
  async send(request: Request): Promise<void> {
    const call = this.call as ClientDuplexStream<Request, Response>;
    await Promise.race([this.ended, new Promise<void>((resolve) => call.write(request, () => resolve()))]);
  }

  /** Ends the client's messages. */
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
