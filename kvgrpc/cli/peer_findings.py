"""Findings of `kvgrpc doctor` between servers: who answers, who reaches whom, over which data path, how fast."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import permutations

from kvgrpc import client
from kvgrpc.cli.machine_findings import Finding, Grade
from kvgrpc.client import Client, Credentials, name_of
from kvgrpc.errors import KVGrpcError, Reason
from kvgrpc.v1 import common_pb2, handshake_pb2, pool_types_pb2

PROBE_BLOCKS = 64
"""Maximum number of blocks of a measured move."""
PROBES = 5
"""Number of measured moves, of which the fastest counts."""
NOT_READY = "docs/runbook.md: KvgrpcNotReady; a drain ends with kvgrpc drain --cancel"
TAKES_WORK = (handshake_pb2.ADMISSION_OPEN, handshake_pb2.ADMISSION_OVERLOADED)


async def of_servers(
    addresses: Sequence[str], timeout_s: float, credentials: Credentials, *, measured: bool
) -> AsyncIterator[Finding]:
    """Yields the findings of each server, then of each pair, both ways. With `measured` it moves blocks, too."""
    async with AsyncExitStack() as stack:
        known: dict[str, Client] = {}
        for address in addresses:
            server = client.connect(address, timeout_s=timeout_s, credentials=credentials)
            await stack.enter_async_context(server)
            finding = await _state(server, address)
            yield finding
            if finding.grade is not Grade.ERROR:
                known[address] = server
        for one, other in permutations(known, 2):
            async for finding in _pair(known[one], one, known[other], other, measured=measured):
                yield finding


async def _state(server: Client, address: str) -> Finding:
    try:
        state = await server.status()
    except KVGrpcError as error:
        return Finding(Grade.ERROR, address, str(error), _remedy(error))
    admission = name_of(handshake_pb2.Admission, state.admission)
    why = f" ({state.admission_reason})" if state.admission_reason else ""
    grade = Grade.OK if state.admission in TAKES_WORK else Grade.WARNING
    says = f"{state.header.engine_id}, version {state.version}, admission {admission}{why}"
    return Finding(grade, address, says, NOT_READY if grade is Grade.WARNING else "")


def _remedy(error: KVGrpcError) -> str:
    if "tls" in error.metadata:
        return "docs/security.md says which files both sides need"
    if error.reason in {Reason.ROLE_MISSING, Reason.NOT_AUTHENTICATED}:
        return "ask with a certificate or a token that has the role viewer"
    return "is a server running there, and may packets pass?"


async def _pair(
    server: Client, address: str, peer: Client, peer_address: str, *, measured: bool
) -> AsyncIterator[Finding]:
    subject = f"{address} to {peer_address}"
    try:
        met = (await server.connect_peer(peer_address)).peer
    except KVGrpcError as error:
        remedy = "add it to dial_allow" if error.reason is Reason.DIAL_REFUSED else _remedy(error)
        yield Finding(Grade.ERROR, subject, str(error), remedy)
        return
    if not met.paths:
        yield Finding(Grade.ERROR, subject, "no data path leads there", "compare data_paths of both servers")
        return
    path = met.paths[0]
    yield Finding(Grade.OK, subject, f"{name_of(common_pb2.DataPath, path.data_path)}: {path.why}")
    for rejected in path.rejected_paths:
        said = f"not {name_of(common_pb2.DataPath, rejected.data_path)}: {rejected.why}"
        yield Finding(Grade.NOTE, subject, said, "docs/runbook.md: KvgrpcSlowPath")
    if measured:
        yield await _speed(server, peer, subject)


async def _speed(destination: Client, source: Client, subject: str) -> Finding:
    """Measures pulls of blocks that belong to nobody else."""
    pools = [(await one.describe_pools()).pools for one in (source, destination)]
    if not all(found and found[0].kind == pool_types_pb2.POOL_KIND_SERVER_MANAGED for found in pools):
        return Finding(
            Grade.NOTE, subject, "not measured: an engine manages its blocks itself",
            "measure between servers with pools of their own, such as kvgrpc serve has, on the same hosts",
        )  # fmt: skip
    try:
        best_s, nbytes = await _moved(destination, source, pools[1][0].groups[0])
    except KVGrpcError as error:
        return Finding(
            Grade.WARNING, subject, f"no block could be moved: {error}", "docs/runbook.md: KvgrpcTransfersFail"
        )
    return Finding(Grade.OK, subject, f"{nbytes / best_s / 1e9:.2f} GB/s, {nbytes:,} bytes in {best_s * 1e3:.1f} ms")


async def _moved(destination: Client, source: Client, group: pool_types_pb2.Group) -> tuple[float, int]:
    """Returns the time of the fastest pull in seconds, and its bytes."""
    count = max(min(PROBE_BLOCKS, group.block_count // 4), 1)
    made = await source.allocate(count, label="doctor")
    try:
        into = await destination.allocate(count, label="doctor")
        try:
            times, nbytes = [], 0
            tokens = list(range(count * group.block_tokens))
            for _ in range(PROBES):
                handed = await source.finished_blocks(made, tokens, ttl_s=30)
                began = time.perf_counter()
                pulled = await destination.pull(handed.grant, tokens, blocks=into)
                times.append(time.perf_counter() - began)
                nbytes = pulled.moved_bytes
            return min(times), nbytes
        finally:
            await destination.free(into)
    finally:
        await source.free(made)
