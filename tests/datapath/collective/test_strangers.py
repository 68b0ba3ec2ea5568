"""A process group's port is open to anyone who reaches it, but strangers change nothing there, and hear nothing."""

import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.collective.group import RECEIVER, SENDER
from kvgrpc.datapath.collective.half import CONNECTIONS, TOKEN_BYTES, Half as Told, read_half
from tests.datapath.collective.conftest import NBYTES, Made
from tests.datapath.halves import Half
from tests.datapath.movers import until
from tests.datapath.peers import DEADLINE_S, open_descriptors, runs_of
from tests.datapath.pumped import HOST

SAID = [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xfe" + secrets.token_bytes(4_095), b"\xff" * 64]
GREETING = struct.Struct("=Q")
"""Format of the rank that a connection wants at a port, which serves each rank of the group."""
PREAMBLE = struct.Struct("=6Q")
"""Format of the header before each message: bytes in all, kind, slot, and the rest."""
SENT, SEND_READY, RECEIVE_READY = 1, 2, 3
WAITED_FOR = 0xFFFF
"""Port of a half that is waited for: the half with the greater port, compared low byte first, connects to the other."""
SHORT_S = 0.2
"""Timeout of a stranger, in seconds; nobody answers it, so the test takes this long."""


def ports_of(half: Half) -> list[int]:
    """Returns the ports at which a half listens."""
    half.wait_told()
    return [port for _, port in read_half(half.values, HOST).addresses]


def test_what_strangers_say_at_the_port_of_a_group_ends_nothing(made: Made) -> None:
    halves, source, destination = made
    with ExitStack() as stack:
        for port in [*ports_of(halves.source), *ports_of(halves.destination)]:
            for said in SAID:
                stranger = stack.enter_context(socket.create_connection((HOST, port), timeout=DEADLINE_S))
                stranger.sendall(said)
        halves.meet()
        jobs = halves.move(runs_of((0, 0, NBYTES)))
    assert [(job.poll(), job.error) for job in jobs] == [(PostingState.DONE, "")] * 2
    assert np.array_equal(source, destination)


def test_a_group_that_has_met_lets_no_stranger_in(made: Made) -> None:
    halves, source, destination = made
    ports = [*ports_of(halves.source), *ports_of(halves.destination)]
    halves.meet()
    before = open_descriptors()
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection((HOST, port), timeout=SHORT_S)
    assert open_descriptors() == before
    halves.move(runs_of((0, 0, NBYTES)))
    assert np.array_equal(source, destination)


class Impostor:
    """A stranger that comes to a port before the peer does, and speaks Gloo: it reads what is sent to the peer, and
    sends `said` for each message that is expected.
    """

    def __init__(self, port: int, rank: int, said: bytes, before_it_takes: Callable[[], None] = lambda: None) -> None:
        self._said, self._before_it_takes = said, before_it_takes
        self._connection = socket.create_connection((HOST, port), timeout=DEADLINE_S)
        self._connection.sendall(GREETING.pack(rank))
        until(self._is_read)
        self.heard = b""
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def close(self) -> None:
        """Waits until the other end is gone, and closes the connection."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._connection.close()

    def _is_read(self) -> bool:
        """Tells whether the other end, in this process, has read everything that was sent to it."""
        here, there = (f"{name[1]:04X}" for name in (self._connection.getpeername(), self._connection.getsockname()))
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        ends = [row[4] for row in rows if row[1].endswith(f":{here}") and row[2].endswith(f":{there}")]
        return [end.partition(":")[2] for end in ends] == ["00000000"]

    def _listen(self) -> None:
        with suppress(OSError), self._connection.makefile("rb") as said:
            while len(head := said.read(PREAMBLE.size)) == PREAMBLE.size:
                size, code, slot, offset, length, _ = PREAMBLE.unpack(head)
                if code == SEND_READY:
                    self._before_it_takes()
                    self._connection.sendall(PREAMBLE.pack(PREAMBLE.size, RECEIVE_READY, slot, offset, length, 0))
                elif code == RECEIVE_READY:
                    self._connection.sendall(PREAMBLE.pack(PREAMBLE.size + length, SENT, slot, offset, length, 0))
                    self._connection.sendall(self._said)
                elif code == SENT:
                    self.heard += said.read(size - PREAMBLE.size)


def told_with_ports(values: Values, port: int) -> Values:
    """Returns a half's values, with another port in all of its addresses."""
    told = read_half(values, HOST)
    return Told(told.token, tuple((ip, port) for ip, _ in told.addresses)).values


@pytest.mark.parametrize("ignorant", range(CONNECTIONS))
@pytest.mark.parametrize("taken", ["source", "destination"])
def test_who_takes_the_place_of_a_peer_at_any_connection_hears_no_byte_of_memory_and_writes_none(
    made: Made, taken: str, ignorant: int
) -> None:
    halves, _, destination = made
    half, peer = halves.both if taken == "source" else halves.both[::-1]
    peer.wait_told()
    ports, token = ports_of(half), read_half(half.values, HOST).token
    impostors = [
        Impostor(port, RECEIVER if taken == "source" else SENDER, b"\xee" * TOKEN_BYTES if index == ignorant else token)
        for index, port in enumerate(ports)
    ]
    half.group.learn(told_with_ports(peer.values, WAITED_FOR))
    job = half.start(runs_of((0, 0, NBYTES)))
    half.wait_ended()
    halves.close()
    for impostor in impostors:
        impostor.close()
    assert job.poll() is PostingState.FAILED
    assert "is not the peer's" in job.error
    assert sum(len(impostor.heard) for impostor in impostors) <= (ignorant + 1) * TOKEN_BYTES
    assert not destination.any()


def test_a_group_ends_though_who_took_the_place_of_its_peer_wants_more_of_it_then(made: Made) -> None:
    halves, _, _ = made
    half, peer = halves.both
    peer.wait_told()
    impostor = Impostor(
        ports_of(half)[0], RECEIVER, b"\xee" * TOKEN_BYTES, lambda: until(lambda: bool(half.group.broken))
    )
    half.group.learn(told_with_ports(peer.values, WAITED_FOR))
    until(lambda: half.group.ended)
    impostor.close()
    assert "is not the peer's" in half.group.broken
    assert not impostor.heard
