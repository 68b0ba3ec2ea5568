// The steps of a scheduler, over one stream.

import { ScheduleRequest, SchedulerServiceService, type ScheduleResponse } from "../gen/kvgrpc/v1/scheduler.js";
import type { CallOptions, Caller } from "./caller.js";
import { Pauses } from "./pauses.js";
import { endedStream, passing } from "./retryable.js";
import type { Partially } from "./services.js";
import type { Stream } from "./stream.js";

/** Options of one step. The trace context is that of the requests that arrive in the step and state none. */
export type StepOptions = Pick<CallOptions, "timeoutMs" | "signal" | "traceparent">;

/** Largest number of times that a step is sent: as often as gRPC sends a unary call that meets UNAVAILABLE. */
const ATTEMPTS = 4;

/** Sends a scheduler's steps over one stream, one at a time. `Client.steps` makes it. */
export class Steps {
  private stream: Stream<ScheduleRequest, ScheduleResponse> | undefined;
  private turn = Promise.resolve();

  constructor(
    private readonly caller: Caller,
    private readonly metadata: Record<string, string>,
  ) {}

  /**
   * Sends a step and returns its answer. A refused call of the step says so in its answer, and the other calls take
   * effect. When the stream is lost, another one is opened and the step is sent again, which is safe.
   */
  step(request: Partially<ScheduleRequest>, options: StepOptions = {}): Promise<ScheduleResponse> {
    const step = ScheduleRequest.fromPartial(request as object);
    const traceparent = this.caller.traceparent(options);
    for (const { requestArrived } of step.calls) {
      if (requestArrived && traceparent) requestArrived.traceparent ||= traceparent;
    }
    return this.caller.within(SchedulerServiceService.schedule, options, (signal) => {
      const answer = unless(signal, this.turn).then(() => this.answer(step, signal));
      this.turn = Promise.allSettled([this.turn, answer]).then(() => {});
      return answer;
    });
  }

  /** Ends the stream. A later step opens another one. */
  close(): void {
    this.stream?.cancel();
    this.stream = undefined;
  }

  private async answer(step: ScheduleRequest, signal: AbortSignal): Promise<ScheduleResponse> {
    const pauses = new Pauses();
    for (let attempt = 1; ; attempt++) {
      try {
        return await unless(signal, this.exchange(step));
      } catch (error) {
        this.close(); // a late answer to this step must not be taken for the next one's
        signal.throwIfAborted();
        const { retryDelayMs } = passing(error);
        if (attempt === ATTEMPTS) throw error;
        await pauses.next(retryDelayMs, signal);
      }
    }
  }

  private async exchange(step: ScheduleRequest): Promise<ScheduleResponse> {
    // A stream belongs to no request, so it has no trace context.
    const options = { metadata: this.metadata, traceparent: "" };
    const stream = (this.stream ??= this.caller.stream(SchedulerServiceService.schedule, undefined, options));
    await stream.send(step);
    const reply = await stream.next();
    if (!reply) throw endedStream("the steps");
    return reply;
  }
}

/** Returns the value of a promise, or throws the signal's reason when that aborts first. */
async function unless<T>(signal: AbortSignal, promise: Promise<T>): Promise<T> {
  signal.throwIfAborted();
  let abort = () => {};
  const aborted = new Promise<never>((_, reject) => (abort = () => reject(signal.reason)));
  signal.addEventListener("abort", abort);
  try {
    return await Promise.race([promise, aborted]);
  } finally {
    signal.removeEventListener("abort", abort);
  }
}
