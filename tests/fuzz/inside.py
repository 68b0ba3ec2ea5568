"""Code inside a server under inputs: it reports the server's state, and how long its loop stood still.

The state is what GetStatus, GetPoolStatus, ListPins and ListLeases return, in a tenth of their time. Values that change
by themselves are replaced: ages are left out, a lease shows its exact end instead of its remaining time, and open
accesses are listed instead of counted.
"""

import asyncio
import ctypes
import gc
import hashlib
import importlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from kvgrpc.core.state.move import AT_ISSUER
from kvgrpc.core.values.owners import ENGINE_SIDE
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc import pins
from tests.service import forks

DIGEST_BYTES = 16
ANSWER_S = 20.0
"""Timeout for an answer, in seconds. It is far above what any answer takes; a later answer is a finding."""
ENVIRONMENT = {forks.INSIDE: __name__}
"""Environment of a server that runs this module."""


def address(pid: int) -> str:
    """Returns the server's address, in the abstract namespace so that no file is left."""
    return f"\0kvgrpc-fuzz-{pid}"


_STALL = struct.Struct(">d")
_libc = ctypes.CDLL(None)


class State:
    """Asks the server for the digest of its state, which a refusal must not change."""

    def __init__(self, pid: int) -> None:
        self.stall_s = 0.0
        """Longest stall of the server's loop since this was set to 0, in seconds."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(ANSWER_S)
        self._socket.bind("")  # a unique name
        self._socket.connect(address(pid))

    def __call__(self) -> bytes:
        return self._ask(b"?")

    def hands(self) -> bytes:
        """Returns a digest that stays equal while nothing changes hands: see `hands_of`."""
        return self._ask(b"h")

    def trim(self) -> None:
        """Makes the server return freed memory. It collects no garbage, because a collection would hide some."""
        self._ask(b"t")

    def collect(self) -> None:
        """Makes the server collect its garbage and return freed memory."""
        self._ask(b"c")

    def _ask(self, what: bytes) -> bytes:
        self._socket.send(what)
        answer = self._socket.recv(DIGEST_BYTES + _STALL.size)
        self.stall_s = max(self.stall_s, *_STALL.unpack(answer[: _STALL.size]))
        return answer[_STALL.size :]

    def close(self) -> None:
        self._socket.close()


def rows_of(lead: Lead) -> Iterator[bytes]:
    """Yields the state that a refusal must not change. Every change of a transfer increments `transfers.seq`."""
    lead.runner.advance()
    node, state = lead.runner.node, lead.runner.node.state
    groups = range(len(state.life.engine.pool.groups)) if state.life.description else range(0)
    held = [access_id for access_id, access in state.access.rows.items() if access.held]
    # Accesses that are open at other engines.
    opened = [move.name for move in state.moves if move.stage in AT_ISSUER]
    counts = state.transfers.seq, [*state.transfers.counts.values()], len(state.send.leases), state.moves.bytes_received
    pools = [(state.pool.allocator.free_count(group), state.pool.allocator.allocated(group)) for group in groups]
    yield repr((counts, pools, state.pool.pins.quarantined, held, opened)).encode()
    for pin in state.pool.pins:
        yield pins.message(node, pin, pin.since).SerializeToString(deterministic=True)
    for lease in state.send.leases:
        if lease.live:
            yield f"{lease.id} {lease.deadline.hex()}".encode()


def hands_of(lead: Lead) -> Iterator[bytes]:
    """Yields each allocation with its owner and blocks, and each pin that is not held for the attached engine."""
    lead.runner.advance()
    state = lead.runner.node.state
    for allocation_id in map(str, state.pool.allocator.kept_bytes):
        blocks = [ids.tolist() for ids in state.pool.allocator.find(allocation_id) or ()]
        yield f"{allocation_id} {state.pool.allocator.owner(allocation_id)} {blocks}".encode()
    for pin in state.pool.pins:
        held_for = state.send.leases.find(pin.owner) or state.transfers.find(pin.owner)
        if held_for is None or held_for.owner not in ENGINE_SIDE:
            yield f"{pin.owner} {pin.kind.value}".encode()


def digest_of(rows: Iterator[bytes]) -> bytes:
    """Returns a digest that is equal only for equal rows."""
    made = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for row in rows:
        made.update(len(row).to_bytes(4, "big") + row)
    return made.digest()


class Stalls:
    """Measures how long a loop runs callbacks between two looks for events, without the time in which its thread was
    ready but the machine ran others.
    """

    def __init__(self, loop: Any) -> None:
        self._longest_s = 0.0
        self._waited = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._select = loop._selector.select
        self._since = self._now()
        loop._selector.select = self._look

    def take(self) -> float:
        """Returns the longest stall since the last call, without the current one, which starts anew."""
        longest_s, self._longest_s = self._longest_s, 0.0
        self._since = self._now()
        return longest_s

    def _look(self, timeout: float | None = None) -> Any:
        self._longest_s = max(self._longest_s, self._now() - self._since)
        events = self._select(timeout)
        self._since = self._now()
        return events

    def _now(self) -> float:
        """Returns a time that stands still while the thread waits for a processor."""
        ready_ns = int(os.pread(self._waited, 64, 0).split()[1])
        return time.monotonic() - ready_ns / 1e9


def listen(lead: Lead) -> None:
    """Answers every datagram with the longest stall since the last one and the digest of the state, on the main
    loop.
    """
    loop = asyncio.get_running_loop()
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    asked.bind(address(os.getpid()))
    stalls = Stalls(loop)

    def answer() -> None:
        what, who = asked.recvfrom(1)
        stall_s = stalls.take()
        if what == b"c":
            gc.collect()
        if what in b"ct":
            _libc.malloc_trim(0)
        rows = {b"?": rows_of, b"h": hands_of}.get(what)
        asked.sendto(_STALL.pack(stall_s) + (digest_of(rows(lead)) if rows else b""), who)
        stalls.take()

    loop.add_reader(asked, answer)


def install() -> None:
    """Makes every server of this process listen from its start."""
    server: Any = importlib.import_module("kvgrpc.server")  # the process that asks does not need it
    build = server.build

    def build_and_listen(lead: Lead, *rest: object) -> object:
        listen(lead)
        return build(lead, *rest)

    server.build = build_and_listen
