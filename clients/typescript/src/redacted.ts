// Messages as text for logs, without their secrets.

const REDACTED = "[REDACTED]";

/** Fields that the schema marks with `debug_redact`. A test of the schema compares them. */
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
 * Returns a message of the generated code as JSON, with [REDACTED] in place of its secrets: the tokens of grants,
 * transfer keys, and others. Other bytes are in base64. `console.log` and `JSON.stringify` show the secrets in full.
 */
export function redacted(message: object): string {
  return JSON.stringify(message, function (this: unknown, name, shown: unknown) {
    // This is the stored value, before a toJSON of its own.
    const value = (this as Record<string, unknown>)[name];
    if (SECRETS.has(name) && holdsBytes(value)) return Array.isArray(value) ? value.map(() => REDACTED) : hidden(value);
    return value instanceof Uint8Array ? Buffer.from(value).toString("base64") : shown;
  });
}

function holdsBytes(value: unknown): boolean {
  return value instanceof Uint8Array || (Array.isArray(value) && value.every((row) => row instanceof Uint8Array));
}

/** Returns [REDACTED], or an empty text for a secret that is not stated. */
function hidden(value: unknown): string {
  return (value as Uint8Array).length > 0 ? REDACTED : "";
}
