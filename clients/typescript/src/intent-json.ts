// The JSON form of an Intent. Routers put it into an engine's request under `kvgrpc_intent`.
//
// Where a message holds a Duration, the generated toJSON differs from Protobuf's JSON mapping, which writes "2.5s".

import { Intent } from "../gen/kvgrpc/v1/common.js";
import { durationFromJson, durationToJson } from "./durations.js";
import type { Partially } from "./services.js";

/** Names of its Durations in JSON. Readers also take the spelling of the schema. */
const DURATIONS = [
  ["ttl", "ttl"],
  ["firmTtl", "firm_ttl"],
] as const;

export function intentToJson(intent: Partially<Intent>): Record<string, unknown> {
  const whole = Intent.fromPartial(intent);
  const json = Intent.toJSON(whole) as Record<string, unknown>;
  for (const [name] of DURATIONS) {
    const value = whole[name];
    if (value) json[name] = durationToJson(value);
  }
  return json;
}

export function intentFromJson(json: object): Intent {
  const rest: Record<string, unknown> = { ...json };
  const stated = DURATIONS.map(([name, spelled]) => {
    const value = rest[name] ?? rest[spelled];
    delete rest[name];
    delete rest[spelled];
    return [name, value] as const;
  });
  const intent = Intent.fromJSON(rest);
  for (const [name, value] of stated) {
    if (value !== undefined && value !== null) intent[name] = durationFromJson(value);
  }
  return intent;
}
