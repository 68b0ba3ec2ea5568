// The methods and messages of the generated code, by their names in the schema.

import * as kvgrpc from "kvgrpc";
import type { Client, Method } from "kvgrpc";

type ServiceName = "admin" | "fleet" | "handoff" | "handshake" | "leases" | "pool" | "scheduler" | "tensors" | "transfers";

interface MessageType {
  fromPartial(fields: object): object;
}

export interface AnyMethod {
  /** Name of the service in the client. */
  service: ServiceName & keyof Client;
  name: string;
  definition: Method<object, object>;
  requestType: string;
  responseType: string;
}

const SERVICES: [ServiceName & keyof Client, object][] = [
  ["admin", kvgrpc.AdminServiceService],
  ["fleet", kvgrpc.FleetServiceService],
  ["handoff", kvgrpc.HandoffServiceService],
  ["handshake", kvgrpc.HandshakeServiceService],
  ["leases", kvgrpc.LeaseServiceService],
  ["pool", kvgrpc.PoolServiceService],
  ["scheduler", kvgrpc.SchedulerServiceService],
  ["tensors", kvgrpc.TensorServiceService],
  ["transfers", kvgrpc.TransferServiceService],
];

const methods = new Map<string, AnyMethod>();
for (const [service, definitions] of SERVICES) {
  for (const [name, definition] of Object.entries(definitions) as [string, Method<object, object>][]) {
    const type = `.kvgrpc.v1.${definition.path.split("/").at(-1)}`;
    const requestType = `${type}Request`;
    methods.set(definition.path, { service, name, definition, requestType, responseType: `${type}Response` });
  }
}

/** Returns the method of a path, for example "kvgrpc.v1.LeaseService/GetLease". */
export function methodOf(path: string): AnyMethod {
  const found = methods.get(`/${path}`);
  if (!found) throw new TypeError(`there is no method ${path}`);
  return found;
}

/** Returns the message of a type, for example ".kvgrpc.v1.GetLeaseRequest". */
export function messageOf(type: string): MessageType {
  return (kvgrpc as unknown as Record<string, MessageType>)[type.split(".").at(-1)!]!;
}
