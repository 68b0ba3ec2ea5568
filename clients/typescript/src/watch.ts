// Watches transfers over streams that break. No message is repeated or lost.

import { status } from "@grpc/grpc-js";
import type { ResponseHeader } from "../gen/kvgrpc/v1/common.js";
import {
  TransferServiceService,
  WatchTransfersRequest,
  type TransferFilter,
  type WatchTransfersResponse,
} from "../gen/kvgrpc/v1/transfer.js";
import type { CallOptions, Caller } from "./caller.js";
import { KvGrpcError } from "./errors.js";
import { Pauses } from "./pauses.js";
import { endedStream, passing } from "./retryable.js";
import type { Partially } from "./services.js";

/** A point in the history of an engine's life. The header of any reply is one. */
export type Position = Pick<ResponseHeader, "eventSeq" | "incarnation">;

export interface WatchOptions extends Omit<CallOptions, "timeoutMs"> {
  /** Transfers to watch; all by default. */
  filter?: Partially<TransferFilter>;
  /** Point after which every change is reported; the present by default. */
  after?: Position;
}

/**
 * Yields every change of the matching transfers, in order, for as long as the reader reads. A stream that breaks is
 * resumed after the last message.
 *
 * A message with `historyLost` stands for changes that are missing: list the transfers. The watch continues with later
 * changes. When the engine's life is over, the watch ends with INCARNATION_CHANGED. Everything of that life is gone,
 * including its last changes that were not reported.
 */
export async function* watch(
  caller: Caller,
  options: WatchOptions = {},
): AsyncGenerator<WatchTransfersResponse, void, void> {
  const { filter, after, ...call } = options;
  let { eventSeq, incarnation } = after ?? { eventSeq: 0, incarnation: 0 };
  const pauses = new Pauses();
  for (;;) {
    const request = WatchTransfersRequest.fromPartial({ filter, afterEventSeq: eventSeq, incarnation });
    let ended = endedStream("the watch");
    try {
      for await (const message of caller.stream(TransferServiceService.watchTransfers, request, call)) {
        const header = message.header!;
        if (incarnation && header.incarnation !== incarnation) throw anotherLife(header, incarnation);
        ({ eventSeq, incarnation } = header);
        pauses.reset();
        // A message with neither only states the server's progress.
        if (message.transfer || message.historyLost) yield message;
      }
    } catch (error) {
      ended = passing(error);
    }
    await pauses.next(ended.retryDelayMs, call.signal);
  }
}

function anotherLife(header: ResponseHeader, before: number): KvGrpcError {
  return new KvGrpcError(
    status.ABORTED,
    `engine ${header.engineId} has started over: its life ${before} is over, with all leases, grants and transfers`,
    {
      reason: "INCARNATION_CHANGED",
      next: "RECOMPUTE",
      engineId: header.engineId,
      incarnation: header.incarnation,
    },
  );
}
