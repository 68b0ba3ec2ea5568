"""The services of the schema, by their full names."""

from google.protobuf.descriptor import ServiceDescriptor

from kvgrpc.peer.v1 import peer_pb2, rank_pb2
from kvgrpc.v1 import (
    admin_pb2,
    calls_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    scheduler_pb2,
    tensor_pb2,
    transfer_pb2,
)

FILES = (
    handshake_pb2, handoff_pb2, transfer_pb2, lease_pb2, scheduler_pb2, tensor_pb2, pool_pb2, admin_pb2, calls_pb2,
    peer_pb2, rank_pb2,
)  # fmt: skip


def services() -> dict[str, ServiceDescriptor]:
    return {service.full_name: service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()}
