// The JSON form of an Intent, which routers put into an engine's request under `kvgrpc_intent`.
//
// The generated toJSON is not Protobuf's JSON mapping where a message holds a Duration: the mapping writes "2.5s".

import { Intent } from "../gen/kvgrpc/v1/common.js";
import { durationFromJson, durationToJson } from "./durations.js";
import type { Partially } from "./services.js";

export function intentToJson(intent: Partially<Intent>): Record<string, unknown> {
  const whole = Intent.fromPartial(intent);
  const json = Intent.toJSON(whole) as Record<string, unknown>;
  if (whole.ttl) json.ttl = durationToJson(whole.ttl);
  return json;
}

export function intentFromJson(json: object): Intent {
  const { ttl, ...rest } = json as { ttl?: unknown };
  const intent = Intent.fromJSON(rest);
  if (ttl !== undefined && ttl !== null) intent.ttl = durationFromJson(ttl);
  return intent;
}
