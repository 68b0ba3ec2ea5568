"""Roles: who may call which method. One table has a row for every method, whatever carries the call.

A row is named as gRPC names methods, "package.Service/Method". A call within a stream or a frame has a row of its own,
named by its message and its field, such as "kvgrpc.peer.v1.PeerCall/open_access".
"""

from collections.abc import Iterator, Mapping
from enum import Enum


class Role(Enum):
    """A part that a caller plays."""

    __hash__ = object.__hash__

    ENGINE = "engine"
    """The scheduler of an engine: hands its blocks over, pulls, allocates."""
    PEER = "peer"
    """Another lead."""
    RANK = "rank"
    """A worker of the attached engine on another host."""
    ROUTER = "router"
    """A router that follows, cancels and drives transfers."""
    OPERATOR = "operator"
    """A person or a controller that drains a server and clears what is stuck."""
    VIEWER = "viewer"
    """Whoever looks, and changes nothing."""


Roles = frozenset[Role]
_E, _P, _K, _R, _O, _V = Role
EVERY: Roles = frozenset(Role)
"""Row of a method for every caller with a role."""
ANYONE: Roles = frozenset()
"""Row of a method for every caller, also without a name: a probe of health shows none."""
_LOOK = frozenset({_E, _R, _O, _V})
_MOVE = frozenset({_E, _R})
_BETWEEN = frozenset({_E, _P, _R})
_END = frozenset({_E, _R, _O})
_SCHEDULE = frozenset({_E})
_OPERATE = frozenset({_O})
_PEERS = frozenset({_P})
_RANKS = frozenset({_K})
LOCAL: Roles = frozenset({_E, _K})
"""Roles of processes at the session socket: the kernel says that they are of this server's user."""

_SERVICES: Mapping[str, Mapping[Roles, str]] = {
    "kvgrpc.v1.HandshakeService": {
        EVERY: "GetCapabilities GetEngine WatchEngine CheckCompatibility",
        _PEERS: "Handshake",
        _END: "ConnectPeer",
    },
    "kvgrpc.v1.HandoffService": {
        _MOVE: "FinishedBlocks PullBlocks ReserveBlocks",
        _BETWEEN: "RegisterPush",
    },
    "kvgrpc.v1.TransferService": {
        _LOOK: "GetTransfer WaitTransfer WaitTransfers ListTransfers WatchTransfers",
        _MOVE: "AcknowledgeTransfers",
        _END: "CancelTransfer",
    },
    "kvgrpc.v1.LeaseService": {
        _MOVE: "GrantLease FindOffers WatchOffers",
        _BETWEEN: "RenewLeases KeepAlive",
        _END: "ReleaseLease",
        _LOOK: "GetLease ListLeases",
    },
    "kvgrpc.v1.SchedulerService": {
        _SCHEDULE: "RequestArrived MatchTokens BlocksAllocated TokensComputed BlocksLoaded RequestFinished "
        "RequestPreempted AbortRequest BlocksNeeded PollSchedulerNews Schedule",
    },
    "kvgrpc.v1.TensorService": {
        _BETWEEN: "PutTensor GetTensor ReleaseTensors",
        _LOOK: "ListTensors GetStagingStatus",
    },
    "kvgrpc.v1.PoolService": {
        _LOOK: "DescribePools GetPoolStatus ListAllocations",
        _MOVE: "AllocateBlocks FreeBlocks ReclaimBlocks",
        frozenset({_E, _O}): "ReadBlocks",
    },
    "kvgrpc.v1.AdminService": {
        _LOOK: "GetStatus ListPeers ListPins GetDrain",
        frozenset({_O, _V}): "ListAuditRecords ListSpans",
        _OPERATE: "StartDrain CancelDrain ReleaseQuarantine ForgetEngine",
    },
    "kvgrpc.v1.FleetService": {_LOOK: "ListEngines WatchEngines", _END: "PickPair"},
    "kvgrpc.v1.CallService": {EVERY: "StreamCalls"},
    "kvgrpc.peer.v1.PeerService": {_PEERS: "Converse KeepLiveness"},
    "kvgrpc.peer.v1.PeerCall": {
        _PEERS: "open_access settle_access close_access parts_ready checksum_blocks post_send",
    },
    "kvgrpc.peer.v1.RankService": {_RANKS: "ConnectRank"},
    "kvgrpc.session.v1.ClientFrame": {_SCHEDULE: "attach", _RANKS: "attach_rank"},
    "kvgrpc.session.v1.Call": {
        _SCHEDULE: "finished_blocks pull_blocks cancel_transfer renew_leases release_lease grant_lease "
        "allocate_blocks free_blocks reserve_blocks register_push step_done voided reclaim_blocks put_tensor "
        "get_tensor release_tensors",
    },
    "envoy.service.ext_proc.v3.ExternalProcessor": {_END: "Process"},
    "grpc.health.v1.Health": {ANYONE: "Check List Watch"},
    "grpc.reflection.v1.ServerReflection": {EVERY: "ServerReflectionInfo"},
    "grpc.reflection.v1alpha.ServerReflection": {EVERY: "ServerReflectionInfo"},
    "grpc.channelz.v1.Channelz": {
        frozenset({_O, _V}): "GetTopChannels GetServers GetServer GetServerSockets GetChannel GetSubchannel GetSocket",
    },
}


WITHIN: Mapping[str, str] = {
    "kvgrpc.session.v1.ClientFrame/calls": "each call within has a row of Call",
    "kvgrpc.session.v1.ClientFrame/reports": "only a connection that began with attach_rank is heard so",
    "kvgrpc.session.v1.RankReport": "only the worker that attach_rank or ConnectRank let in reports",
    "kvgrpc.v1.ScheduleCall": "each has the role that Schedule needs, which let the stream in",
}
"""Frames, and messages of frames, without rows of their own: why what let their carrier in is enough."""


def _rows() -> Iterator[tuple[str, Roles]]:
    for service, rows in _SERVICES.items():
        for roles, methods in rows.items():
            for method in methods.split():
                yield f"{service}/{method}", roles


METHODS: Mapping[str, Roles] = dict(_rows())
"""Roles of which one is enough, by method."""
