// Credentials from files: what is refused before a call, and what a change of a token's file does.

import assert from "node:assert/strict";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { inspect } from "node:util";
import { connect, type ConnectOptions } from "../src/index.js";
import { BearerToken } from "../src/credentials.js";

const folder = mkdtempSync(join(tmpdir(), "kvgrpc-"));
const empty = join(folder, "empty");
writeFileSync(empty, "");

test("unusable credentials are refused before a call, and the error shows no token", () => {
  const cases: Record<string, ConnectOptions> = {
    "no CA": { tls: { cert: "a", key: "b" } },
    "no key": { tls: { cert: "a", ca: empty } },
    "a missing file": { tls: { dir: folder } },
    "no PEM": { tls: { ca: empty } },
    "two tokens": { token: "a", tokenFile: empty },
    "an empty token": { tokenFile: empty },
    "a token of two rows": { token: "secret\nword" },
  };
  for (const [name, options] of Object.entries(cases)) {
    assert.throws(() => connect("127.0.0.1:1", options), (error: Error) => !error.message.includes("secret"), name);
  }
});

test("a token is read again after a second, and an unusable file leaves the last", (context) => {
  const file = join(folder, "token");
  writeFileSync(file, "first\n");
  let now = 0;
  context.mock.method(performance, "now", () => now);
  const token = new BearerToken(undefined, file);
  const sent = ["first", " second\n", ""].map((text) => {
    writeFileSync(file, text);
    now += 1_000;
    return token.header();
  });
  assert.deepEqual(sent, ["Bearer first", "Bearer second", "Bearer second"]);
});

test("no text of a client shows its token", () => {
  using client = connect("127.0.0.1:1", { token: "secret" });
  assert.doesNotMatch(inspect(client, { depth: 10, showHidden: true }), /secret/);
});
