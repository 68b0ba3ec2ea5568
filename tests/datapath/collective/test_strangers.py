"""The port of a process group is open to whoever reaches it: strangers change nothing there, and hear nothing."""

import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.collective.gloo import GlooGroup
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.host.memory import PrivateMemory
from tests.datapath.halves import Half, Halves
from tests.datapath.peers import DEADLINE_S, Bytes, content, runs_of
from tests.datapath.pumped import HOST, LONG_S

NBYTES = 4_000_000
SAID = [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xfe" + secrets.token_bytes(4_095), b"\xff" * 64]
Made = tuple[Halves, Bytes, Bytes]


GREETING = bytes(8)
"""Of the first half that a Gloo of this version waits for at a port."""
SHORT_S = 1.0


def gloo(sends: bool, wait_s: float, rendezvous: Rendezvous) -> GlooGroup:
    return GlooGroup(sends=sends, host=HOST, rendezvous=rendezvous, wait_s=wait_s)


@pytest.fixture
def wait_s() -> float:
    """How long a half waits for the other one."""
    return LONG_S


@pytest.fixture
def made(wait_s: float) -> Iterator[Made]:
    """A group whose halves have not met, and the memory of its ranks."""
    source, destination = content(1, NBYTES), np.zeros(NBYTES, dtype=np.uint8)
    halves = Halves(
        *(
            Half(partial(gloo, sends, wait_s), PrivateMemory.of(memory).segments, sends=sends)
            for sends, memory in ((True, source), (False, destination))
        )
    )
    yield halves, source, destination
    halves.close()


def port_of(half: Half) -> int:
    """At which it listens: it stands before the address."""
    half.wait_told()
    (value,) = (value for key, value in half.values if not key.startswith("token"))
    return int(struct.unpack("!H", value.partition(socket.inet_aton(HOST))[0][-2:])[0])


@pytest.mark.parametrize("meets", ["before the halves meet", "after they met"])
def test_what_strangers_say_at_the_port_of_a_group_ends_nothing(made: Made, meets: str) -> None:
    halves, source, destination = made
    if meets == "after they met":
        halves.meet()
    with ExitStack() as stack:
        for port in map(port_of, halves.both):
            for said in SAID:
                stranger = stack.enter_context(socket.create_connection((HOST, port), timeout=DEADLINE_S))
                stranger.sendall(said)
        if meets == "before the halves meet":
            halves.meet()
        jobs = halves.move(runs_of((0, 0, NBYTES)))
    assert [(job.poll(), job.error) for job in jobs] == [(PostingState.DONE, "")] * 2
    assert np.array_equal(source, destination)


@pytest.mark.parametrize("wait_s", [SHORT_S])
def test_who_takes_the_place_of_a_peer_ends_the_group_and_hears_no_byte_of_its_memory(made: Made) -> None:
    halves, source, destination = made
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((HOST, port), timeout=DEADLINE_S))
            for port in map(port_of, halves.both)
        ]
        for stranger in strangers:
            stranger.sendall(GREETING)
        halves.learn()
        jobs = halves.move(runs_of((0, 0, NBYTES)))
        halves.close()
        heard = b"".join(iter_all(strangers))
    assert source[:64].tobytes() not in heard
    ends = {job.poll() for job in jobs}
    assert ends in ({PostingState.DONE}, {PostingState.FAILED})
    assert np.array_equal(destination, source if ends == {PostingState.DONE} else np.zeros_like(source))


def iter_all(connections: list[socket.socket]) -> Iterator[bytes]:
    """All that was said to these, which are over."""
    for connection in connections:
        while said := connection.recv(1 << 20):
            yield said
