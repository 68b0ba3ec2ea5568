"""The port of a process group is open to whoever reaches it: what strangers say there changes nothing."""

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
SAID = [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, secrets.token_bytes(4_096), bytes(64), b"\xff" * 64]
Made = tuple[Halves, Bytes, Bytes]


def gloo(sends: bool, rendezvous: Rendezvous) -> GlooGroup:
    return GlooGroup(sends=sends, host=HOST, rendezvous=rendezvous, wait_s=LONG_S)


@pytest.fixture
def made() -> Iterator[Made]:
    """A group whose halves have not met, and the memory of its ranks."""
    source, destination = content(1, NBYTES), np.zeros(NBYTES, dtype=np.uint8)
    halves = Halves(
        *(
            Half(partial(gloo, sends), PrivateMemory.of(memory).segments, sends=sends)
            for sends, memory in ((True, source), (False, destination))
        )
    )
    yield halves, source, destination
    halves.close()


def port_of(half: Half) -> int:
    """At which it listens: it stands before the address."""
    half.wait_told()
    ((_, value),) = half.values
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
