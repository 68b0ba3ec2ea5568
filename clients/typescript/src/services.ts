// The generated services with promises: `leases.getLease({ ... })` makes the call LeaseService.GetLease.

import * as admin from "../gen/kvgrpc/v1/admin.js";
import * as fleet from "../gen/kvgrpc/v1/fleet.js";
import * as handoff from "../gen/kvgrpc/v1/handoff.js";
import * as handshake from "../gen/kvgrpc/v1/handshake.js";
import * as lease from "../gen/kvgrpc/v1/lease.js";
import * as pool from "../gen/kvgrpc/v1/pool.js";
import * as scheduler from "../gen/kvgrpc/v1/scheduler.js";
import * as tensor from "../gen/kvgrpc/v1/tensor.js";
import * as transfer from "../gen/kvgrpc/v1/transfer.js";
import type { CallOptions, Caller, Method } from "./caller.js";

type Builtin = Uint8Array | string | number | boolean | undefined;

/** A message with only some fields stated; the others are unset. */
export type Partially<T> = T extends Builtin
  ? T
  : T extends (infer Item)[]
    ? Partially<Item>[]
    : { [Field in keyof T]?: Partially<T[Field]> };

type Unary = { requestStream: false; responseStream: false };

/** The unary methods of a service. */
export type Service<Definition> = {
  [Name in keyof Definition as Definition[Name] extends Unary ? Name : never]: Definition[Name] extends {
    requestSerialize: (value: infer Request) => Buffer;
    responseDeserialize: (value: Buffer) => infer Response;
  }
    ? (request: Partially<Request>, options?: CallOptions) => Promise<Response>
    : never;
};

interface MessageType {
  fromPartial(fields: object): unknown;
}

/** Returns the request type of a method. The file of each service has it under the method's name. */
export function requestType(file: object, path: string): MessageType {
  const name = `${path.slice(path.lastIndexOf("/") + 1)}Request`;
  const type = (file as Record<string, MessageType | undefined>)[name];
  if (!type) throw new TypeError(`there is no message ${name}`);
  return type;
}

function service<Definition extends object>(caller: Caller, file: object, definition: Definition): Service<Definition> {
  const methods: Record<string, unknown> = {};
  for (const [name, method] of Object.entries(definition) as [string, Method<unknown, unknown>][]) {
    if (method.requestStream || method.responseStream) continue;
    const type = requestType(file, method.path);
    methods[name] = (fields: object = {}, options?: CallOptions) =>
      caller.unary(method, type.fromPartial(fields), options);
  }
  return methods as Service<Definition>;
}

/** All services of one server. */
export interface Services {
  readonly admin: Service<typeof admin.AdminServiceService>;
  readonly fleet: Service<typeof fleet.FleetServiceService>;
  readonly handoff: Service<typeof handoff.HandoffServiceService>;
  readonly handshake: Service<typeof handshake.HandshakeServiceService>;
  readonly leases: Service<typeof lease.LeaseServiceService>;
  readonly pool: Service<typeof pool.PoolServiceService>;
  readonly scheduler: Service<typeof scheduler.SchedulerServiceService>;
  readonly tensors: Service<typeof tensor.TensorServiceService>;
  readonly transfers: Service<typeof transfer.TransferServiceService>;
}

export function services(caller: Caller): Services {
  return {
    admin: service(caller, admin, admin.AdminServiceService),
    fleet: service(caller, fleet, fleet.FleetServiceService),
    handoff: service(caller, handoff, handoff.HandoffServiceService),
    handshake: service(caller, handshake, handshake.HandshakeServiceService),
    leases: service(caller, lease, lease.LeaseServiceService),
    pool: service(caller, pool, pool.PoolServiceService),
    scheduler: service(caller, scheduler, scheduler.SchedulerServiceService),
    tensors: service(caller, tensor, tensor.TensorServiceService),
    transfers: service(caller, transfer, transfer.TransferServiceService),
  };
}
