"""The services of the schema, by their full names, and the requests of RPCs and calls."""

from google.protobuf.descriptor import Descriptor, ServiceDescriptor

from kvgrpc.peer.v1 import peer_pb2, rank_pb2
from kvgrpc.v1 import (
    admin_pb2,
    calls_pb2,
    fleet_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    scheduler_pb2,
    tensor_pb2,
    transfer_pb2,
)
from kvgrpc.wire.accesses import CALLS

FILES = (
    handshake_pb2, handoff_pb2, transfer_pb2, lease_pb2, scheduler_pb2, tensor_pb2, pool_pb2, admin_pb2, calls_pb2,
    fleet_pb2, peer_pb2, rank_pb2,
)  # fmt: skip


def services() -> dict[str, ServiceDescriptor]:
    return {service.full_name: service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()}


def requests() -> dict[str, Descriptor]:
    """Returns the request of each RPC, and of each call between leads."""
    messages = peer_pb2.DESCRIPTOR.message_types_by_name
    calls = {name: messages[f"{name}Request"] for name in CALLS.values()}
    return calls | {rpc.name: rpc.input_type for service in services().values() for rpc in service.methods}
