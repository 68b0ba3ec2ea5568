"""Conversion of the endpoints by which the memory of ranks is reached."""

from collections.abc import Sequence

from kvgrpc.core.values.endpoints import (
    AllocationSpan,
    CmaEndpoint,
    CollectiveEndpoint,
    CudaVmmEndpoint,
    LoopbackEndpoint,
    MemoryKind,
    NixlEndpoint,
    ProcessEndpoint,
    RankEndpoint,
    Segment,
    ShmEndpoint,
    WindowEndpoint,
)
from kvgrpc.v1 import pool_types_pb2
from kvgrpc.wire.bounds import ENDPOINTS_MAX, SEGMENTS_MAX, check_count, check_counts, text
from kvgrpc.wire.enums import numbers

MEMORY_KINDS = numbers(pool_types_pb2.MemoryKind, MemoryKind)
_CORE_MEMORY_KINDS = {int(v): k for k, v in MEMORY_KINDS.items()} | {0: MemoryKind.HOST}
SOCKET_PATH_BYTES_MAX = 108
"""Maximum bytes of a unix socket's path in the kernel."""


def endpoint_to_proto(value: RankEndpoint) -> pool_types_pb2.RankEndpoint:
    made = pool_types_pb2.RankEndpoint(rank=value.rank)
    if value.shm:
        shm = value.shm
        made.shm.CopyFrom(
            pool_types_pb2.ShmEndpoint(
                socket_path=shm.socket_path,
                token=shm.token,
                size_bytes=shm.nbytes,
                nonce=shm.nonce,
                nonce_offset=shm.nonce_offset,
            )
        )
    if value.cma:
        cma = value.cma
        made.cma.CopyFrom(
            pool_types_pb2.CmaEndpoint(process=_process(cma.process), segments=[_segment(s) for s in cma.segments])
        )
    if value.cuda_vmm:
        made.cuda_vmm.CopyFrom(_cuda_vmm(value.cuda_vmm))
    if value.nixl:
        nixl = value.nixl
        made.nixl.CopyFrom(
            pool_types_pb2.NixlEndpoint(
                agent=nixl.agent,
                metadata=nixl.metadata,
                backend=nixl.backend,
                segments=[_segment(s) for s in nixl.segments],
                process=_process(nixl.process) if nixl.process else None,
            )
        )
    if value.collective:
        collective = value.collective
        made.collective.CopyFrom(
            pool_types_pb2.CollectiveEndpoint(
                backend=collective.backend, size_bytes=collective.nbytes, framing=collective.framing
            )
        )
    if value.window:
        made.window.CopyFrom(
            pool_types_pb2.WindowEndpoint(size_bytes=value.window.nbytes, framing=value.window.framing)
        )
    if value.loopback:
        made.loopback.CopyFrom(
            pool_types_pb2.LoopbackEndpoint(key=value.loopback.key, size_bytes=value.loopback.nbytes)
        )
    return made


def endpoints_from_proto(values: Sequence[pool_types_pb2.RankEndpoint]) -> tuple[RankEndpoint, ...]:
    """Returns the endpoints that a peer states for its ranks. Raises OutOfRange for too many rows."""
    check_count("endpoints", len(values), ENDPOINTS_MAX)
    check_counts("endpoints.cma.segments", (value.cma.segments for value in values), SEGMENTS_MAX)
    check_counts("endpoints.cuda_vmm.spans", (value.cuda_vmm.spans for value in values), SEGMENTS_MAX)
    check_counts("endpoints.cuda_vmm.allocations", (value.cuda_vmm.allocations for value in values), SEGMENTS_MAX)
    check_counts("endpoints.nixl.segments", (value.nixl.segments for value in values), SEGMENTS_MAX)
    return tuple(endpoint_from_proto(value) for value in values)


def endpoint_from_proto(value: pool_types_pb2.RankEndpoint) -> RankEndpoint:
    """Returns the endpoint that a peer states for a rank. Raises InvalidRequest for a long text."""
    shm = cma = cuda_vmm = nixl = collective = loopback = window = None
    if value.HasField("shm"):
        s = value.shm
        path = text("endpoints.shm.socket_path", s.socket_path, SOCKET_PATH_BYTES_MAX)
        shm = ShmEndpoint(path, s.token, s.size_bytes, s.nonce, s.nonce_offset)
    if value.HasField("cma"):
        c = value.cma
        cma = CmaEndpoint(_core_process(c.process), tuple(_core_segment(x) for x in c.segments))
    if value.HasField("cuda_vmm"):
        cuda_vmm = _core_cuda_vmm(value.cuda_vmm)
    if value.HasField("nixl"):
        n = value.nixl
        process = _core_process(n.process) if n.HasField("process") else None
        agent, backend = text("endpoints.nixl.agent", n.agent), text("endpoints.nixl.backend", n.backend)
        nixl = NixlEndpoint(agent, n.metadata, backend, tuple(_core_segment(x) for x in n.segments), process)
    if value.HasField("collective"):
        backend = text("endpoints.collective.backend", value.collective.backend)
        collective = CollectiveEndpoint(backend, value.collective.size_bytes, value.collective.framing)
    if value.HasField("loopback"):
        loopback = LoopbackEndpoint(text("endpoints.loopback.key", value.loopback.key), value.loopback.size_bytes)
    if value.HasField("window"):
        window = WindowEndpoint(value.window.size_bytes, value.window.framing)
    return RankEndpoint(value.rank, shm, cma, cuda_vmm, nixl, collective, loopback, window)


def _segment(value: Segment) -> pool_types_pb2.Segment:
    return pool_types_pb2.Segment(
        address=value.address, size_bytes=value.nbytes, kind=MEMORY_KINDS[value.kind], device=value.device
    )


def _process(value: ProcessEndpoint) -> pool_types_pb2.ProcessEndpoint:
    return pool_types_pb2.ProcessEndpoint(socket_path=value.socket_path, token=value.token)


def _core_process(value: pool_types_pb2.ProcessEndpoint) -> ProcessEndpoint:
    return ProcessEndpoint(value.socket_path, value.token)


def _core_segment(value: pool_types_pb2.Segment) -> Segment:
    kind = _CORE_MEMORY_KINDS.get(value.kind, MemoryKind.HOST)
    return Segment(value.address, value.size_bytes, kind, value.device)


def _cuda_vmm(value: CudaVmmEndpoint) -> pool_types_pb2.CudaVmmEndpoint:
    return pool_types_pb2.CudaVmmEndpoint(
        socket_path=value.socket_path,
        token=value.token,
        device_uuid=value.device_uuid,
        nonce=value.nonce,
        allocations=[pool_types_pb2.DeviceAllocation(size_bytes=nbytes) for nbytes in value.allocations],
        spans=[
            pool_types_pb2.AllocationSpan(allocation=s.allocation, offset=s.offset, size_bytes=s.nbytes)
            for s in value.spans
        ],
        unavailable_reason=value.why_not,
    )


def _core_cuda_vmm(value: pool_types_pb2.CudaVmmEndpoint) -> CudaVmmEndpoint:
    return CudaVmmEndpoint(
        text("endpoints.cuda_vmm.socket_path", value.socket_path, SOCKET_PATH_BYTES_MAX),
        value.token,
        value.device_uuid,
        value.nonce,
        tuple(one.size_bytes for one in value.allocations),
        tuple(AllocationSpan(s.allocation, s.offset, s.size_bytes) for s in value.spans),
        text("endpoints.cuda_vmm.unavailable_reason", value.unavailable_reason),
    )
