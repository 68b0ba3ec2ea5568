// Credentials of a client: the files of TLS, and a token. No secret is in their text.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createSecureContext } from "node:tls";
import { ChannelCredentials, credentials } from "@grpc/grpc-js";

/**
 * Paths of PEM files for TLS. A path of its own stands in place of the folder's file. With `ca` alone the client checks
 * the server and shows no certificate.
 */
export interface TlsFiles {
  /** Folder with tls.crt, tls.key and ca.crt, as Kubernetes and cert-manager name them. */
  dir?: string;
  /** Path of the client's certificate chain. */
  cert?: string;
  /** Path of the client's key. */
  key?: string;
  /** Path of the CAs that sign servers. */
  ca?: string;
}

/**
 * Returns the credentials of a channel. The files are read again at each handshake, so that a new connection is made with
 * the files of its moment. Throws for files that are not usable. Those that became unusable leave the last ones, because
 * who writes them may be half way.
 */
export function tlsCredentials(files: TlsFiles): ChannelCredentials {
  return new ReloadingCredentials(files);
}

type Connecting = Parameters<ChannelCredentials["_createSecureConnector"]>;
type Connector = ReturnType<ChannelCredentials["_createSecureConnector"]>;

/** Credentials of files that may change. A subchannel has one connector, which makes all of its connections. */
class ReloadingCredentials extends ChannelCredentials {
  readonly #files: TlsFiles;
  #last: ChannelCredentials;

  constructor(files: TlsFiles) {
    super();
    this.#files = files;
    this.#last = credentialsNow(files);
  }

  override _isSecure(): boolean {
    return true;
  }

  override _equals(other: ChannelCredentials): boolean {
    return this === other;
  }

  override _createSecureConnector(...given: Connecting): Connector {
    const first = this.#last._createSecureConnector(...given);
    return {
      connect: (socket) => this.#now()._createSecureConnector(...given).connect(socket),
      waitForReady: () => first.waitForReady(),
      getCallCredentials: () => first.getCallCredentials(),
      destroy: () => first.destroy(),
    };
  }

  #now(): ChannelCredentials {
    try {
      this.#last = credentialsNow(this.#files);
    } catch {
      // The server says when the last ones no longer do.
    }
    return this.#last;
  }
}

function credentialsNow({ dir, cert, key, ca }: TlsFiles): ChannelCredentials {
  const path = (own: string | undefined, name: string) => own ?? (dir === undefined ? undefined : join(dir, name));
  const [certPath, keyPath, caPath] = [path(cert, "tls.crt"), path(key, "tls.key"), path(ca, "ca.crt")];
  if (caPath === undefined) throw new Error("the CAs that sign servers have no path");
  if ((certPath === undefined) !== (keyPath === undefined)) throw new Error("a certificate and its key need a path each");
  const trusted = readFileSync(caPath);
  if (!trusted.includes("-----BEGIN CERTIFICATE-----")) throw new Error(`${caPath} holds no certificate in PEM`);
  if (certPath === undefined || keyPath === undefined) return credentials.createSsl(trusted);
  const own = { cert: readFileSync(certPath), key: readFileSync(keyPath) };
  try {
    createSecureContext(own);
  } catch (error) {
    throw new Error(`${certPath} and ${keyPath} are no certificate with its key: ${(error as Error).message}`);
  }
  return credentials.createSsl(trusted, own.key, own.cert);
}

/** Time between two looks at the file of a token, in milliseconds. */
const TOKEN_LOOK_MS = 1_000;

/** The token of a client, or none. */
export class BearerToken {
  #header: string | undefined;
  #lookedAt = performance.now();
  readonly #file: string | undefined;

  /** Throws for a token that no call can carry, and for a file that cannot be read. */
  constructor(token: string | undefined, file: string | undefined) {
    if (token !== undefined && file !== undefined) throw new Error("a token and a file of one are both given");
    this.#file = file;
    if (file !== undefined) this.#header = headerIn(file);
    else if (token !== undefined) this.#header = headerOf(token);
  }

  /**
   * Returns the metadata of a call that is made now; undefined without a token. A file that became unusable leaves the
   * last token, because who writes the file may be half way.
   */
  header(): string | undefined {
    if (this.#file !== undefined && performance.now() - this.#lookedAt >= TOKEN_LOOK_MS) {
      this.#lookedAt = performance.now();
      try {
        this.#header = headerIn(this.#file);
      } catch {
        // The server says when the last token no longer does.
      }
    }
    return this.#header;
  }
}

function headerIn(file: string): string {
  return headerOf(readFileSync(file, "latin1").trim());
}

function headerOf(token: string): string {
  if (!/^[!-~]+$/.test(token)) throw new Error("a token is one word of printable ASCII");
  return `Bearer ${token}`;
}
