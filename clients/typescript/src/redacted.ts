// Messages as text, for logs, without their secrets.

const REDACTED = "[REDACTED]";

/** Fields that the schema marks with `debug_redact`; a test of the schema compares them. */
const SECRETS = new Set([
  "metadata",
  "nonce",
  "proof",
  "proofs",
  "rankTicket",
  "sessionSecret",
  "ticket",
  "token",
  "transferKey",
]);

/**
 * A message of the generated code as JSON, with [REDACTED] in place of its secrets: tokens of grants, transfer keys,
 * and others. `console.log` and `JSON.stringify` show them in full. Other bytes are in base64.
 */
export function redacted(message: object): string {
  return JSON.stringify(message, function (this: unknown, name, shown: unknown) {
    // What stands there, and not what its own toJSON made of it.
    const value = (this as Record<string, unknown>)[name];
    if (SECRETS.has(name) && holdsBytes(value)) return Array.isArray(value) ? value.map(() => REDACTED) : hidden(value);
    return value instanceof Uint8Array ? Buffer.from(value).toString("base64") : shown;
  });
}

function holdsBytes(value: unknown): boolean {
  return value instanceof Uint8Array || (Array.isArray(value) && value.every((row) => row instanceof Uint8Array));
}

/** A secret that is not stated is none. */
function hidden(value: unknown): string {
  return (value as Uint8Array).length > 0 ? REDACTED : "";
}
