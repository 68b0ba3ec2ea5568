"""The state of a server that is under inputs, from inside of it: what GetStatus, GetPoolStatus, ListPins and ListLeases
tell, in a tenth of their time.

What passes by itself is left out: ages, and of leases the time that is left. In its place is the very moment when a
lease ends, and in that of the number of open accesses which ones are.
"""

import asyncio
import hashlib
import importlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from kvgrpc.core.moves import AT_ISSUER
from kvgrpc.service.admin_service import _pin
from kvgrpc.service.lead import Lead
from tests.service import forks

DIGEST_BYTES = 16
ANSWER_S = 20.0
"""Far above what any answer takes here; what is not answered by then is a finding."""
ENVIRONMENT = {forks.INSIDE: __name__}
"""Of a server that this is to run in."""


def address(pid: int) -> str:
    """Where a server is asked: in the abstract namespace, so that nothing is left of it."""
    return f"\0kvgrpc-fuzz-{pid}"


class State:
    """Tells the digest of a server's state, in the process that asks: what a refusal must leave as it is."""

    def __init__(self, pid: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(ANSWER_S)
        self._socket.bind("")  # a name that nobody else has
        self._socket.connect(address(pid))

    def __call__(self) -> bytes:
        self._socket.send(b"?")
        return self._socket.recv(DIGEST_BYTES)

    def close(self) -> None:
        self._socket.close()


def rows_of(lead: Lead) -> Iterator[bytes]:
    """What a refusal must leave as it is. Every change of a transfer has a number of its own."""
    lead.runner.advance()
    node, state = lead.node, lead.node.state
    groups = range(len(state.pool.pool.groups)) if state.description else range(0)
    held = [access_id for access_id, access in state.accesses.items() if access.held]
    # Those that are open at other engines.
    opened = [move.name for moves in (node._pulls, node._pushes) for move in moves._table if move.stage in AT_ISSUER]
    counts = state.transfers.seq, [*state.transfers.counts.values()], len(state.leases), state.bytes_received
    pools = [(state.allocator.free_count(group), state.allocator.allocated(group)) for group in groups]
    yield repr((counts, pools, state.pins.quarantined, held, opened)).encode()
    for pin in state.pins:
        yield _pin(node, pin, pin.since).SerializeToString(deterministic=True)
    for lease in state.leases:
        if lease.live:
            yield f"{lease.id} {lease.deadline.hex()}".encode()


def digest_of(lead: Lead) -> bytes:
    """Equal for equal states only."""
    made = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for row in rows_of(lead):
        made.update(len(row).to_bytes(4, "big") + row)
    return made.digest()


def listen(lead: Lead) -> None:
    """Answers every datagram with the state's digest, on the loop that runs everything."""
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    asked.bind(address(os.getpid()))

    def answer() -> None:
        _, who = asked.recvfrom(1)
        asked.sendto(digest_of(lead), who)

    asyncio.get_running_loop().add_reader(asked, answer)


def install() -> None:
    """Every server of this process listens from its start on."""
    server: Any = importlib.import_module("kvgrpc.server")  # which the process that asks does not need
    build = server.build

    def build_and_listen(lead: Lead, *rest: object) -> object:
        listen(lead)
        return build(lead, *rest)

    server.build = build_and_listen
