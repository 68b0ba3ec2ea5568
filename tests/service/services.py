"""The services of every server, as the generated code describes them and as a client names them."""

from google.protobuf.descriptor import ServiceDescriptor

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

SERVICES: list[ServiceDescriptor] = [
    handshake_pb2.DESCRIPTOR.services_by_name["HandshakeService"],
    handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"],
    transfer_pb2.DESCRIPTOR.services_by_name["TransferService"],
    lease_pb2.DESCRIPTOR.services_by_name["LeaseService"],
    scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    tensor_pb2.DESCRIPTOR.services_by_name["TensorService"],
    pool_pb2.DESCRIPTOR.services_by_name["PoolService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    calls_pb2.DESCRIPTOR.services_by_name["CallService"],
    fleet_pb2.DESCRIPTOR.services_by_name["FleetService"],
    peer_pb2.DESCRIPTOR.services_by_name["PeerService"],
    rank_pb2.DESCRIPTOR.services_by_name["RankService"],
]
NAMES = [
    "kvgrpc.v1.HandshakeService",
    "kvgrpc.v1.HandoffService",
    "kvgrpc.v1.TransferService",
    "kvgrpc.v1.LeaseService",
    "kvgrpc.v1.SchedulerService",
    "kvgrpc.v1.TensorService",
    "kvgrpc.v1.PoolService",
    "kvgrpc.v1.AdminService",
    "kvgrpc.v1.CallService",
    "kvgrpc.v1.FleetService",
    "kvgrpc.peer.v1.PeerService",
    "kvgrpc.peer.v1.RankService",
]
