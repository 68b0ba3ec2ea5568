// Durations of the schema as milliseconds, the unit of JavaScript.

import type { Duration } from "../gen/google/protobuf/duration.js";

/** Returns a Duration for a request. */
export function duration(ms: number): Duration {
  if (!Number.isFinite(ms)) throw new RangeError(`a duration is a finite number of milliseconds, not ${ms}`);
  const seconds = Math.trunc(ms / 1000);
  return { seconds, nanos: Math.round((ms - seconds * 1000) * 1e6) };
}

/** Returns a Duration of a reply in milliseconds; 0 where it is unset. */
export function milliseconds(value: Duration | undefined): number {
  return value ? value.seconds * 1000 + value.nanos / 1e6 : 0;
}

/** Returns a Duration in Protobuf's JSON mapping, for example "2.500s". */
export function durationToJson({ seconds, nanos }: Duration): string {
  const sign = seconds < 0 || nanos < 0 ? "-" : "";
  const fraction = String(Math.abs(nanos)).padStart(9, "0").replace(/(000){1,3}$/, "");
  return `${sign}${Math.abs(seconds)}${fraction && `.${fraction}`}s`;
}

/** Returns the Duration of a text in Protobuf's JSON mapping. */
export function durationFromJson(text: unknown): Duration {
  const match = /^(-?)(\d+)(?:\.(\d{1,9}))?s$/.exec(String(text));
  if (!match) throw new TypeError(`${JSON.stringify(text)} is not a duration`);
  const sign = match[1] ? -1 : 1;
  const nanos = Number((match[3] ?? "").padEnd(9, "0"));
  return { seconds: sign * Number(match[2]) + 0, nanos: sign * nanos + 0 };
}
