"""The port of a process group is open to whoever reaches it: what strangers say there changes nothing."""

import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.collective.gloo import GlooGroup
from kvgrpc.datapath.collective.group import Group, Job
from kvgrpc.datapath.collective.messages import messages
from tests.datapath.peers import DEADLINE_S, content, runs_of
from tests.datapath.pumped import HOST, LONG_S

NBYTES = 4_000_000
SAID = [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, secrets.token_bytes(4_096), bytes(64), b"\xff" * 64]


class Side:
    """A rank's half of a group, in this process."""

    def __init__(self, *, sends: bool) -> None:
        self.values: Values = ()
        self.told, self.made = threading.Event(), threading.Event()
        self.sends = sends
        self.memory = content(1, NBYTES) if sends else np.zeros(NBYTES, dtype=np.uint8)
        self.group = Group(
            lambda rendezvous: GlooGroup(sends=sends, host=HOST, rendezvous=rendezvous, wait_s=LONG_S),
            told=self._tell,
            ready=self.made.set,
        )

    def _tell(self, values: Values) -> None:
        self.values = values
        self.told.set()

    @property
    def port(self) -> int:
        """At which it listens: it stands before the address."""
        ((_, value),) = self.values
        return int(struct.unpack("!H", value.partition(socket.inet_aton(HOST))[0][-2:])[0])

    def move(self) -> Job:
        ended = threading.Event()
        runs, own = runs_of((0, 0, NBYTES)), (Segment(self.memory.ctypes.data, NBYTES),)
        job = Job(messages(runs, own, sends=self.sends), ended.set)
        self.group.start(1, job)
        self.ended = ended
        return job


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    made = Side(sends=True), Side(sends=False)
    assert all(side.told.wait(LONG_S) for side in made)
    yield made
    for side in made:
        side.group.abort("the test is over")
        assert side.group.join(DEADLINE_S)


@pytest.mark.parametrize("meets", ["before they meet", "after they met"])
def test_what_strangers_say_at_the_port_of_a_group_ends_nothing(sides: tuple[Side, Side], meets: str) -> None:
    source, destination = sides

    def meet() -> None:
        source.group.learn(destination.values)
        destination.group.learn(source.values)
        assert all(side.made.wait(LONG_S) for side in sides)

    if meets == "after they met":
        meet()
    with ExitStack() as stack:
        for side in sides:
            for said in SAID:
                stranger = stack.enter_context(socket.create_connection((HOST, side.port), timeout=DEADLINE_S))
                stranger.sendall(said)
        if meets == "before they meet":
            meet()
        jobs = [side.move() for side in sides]
        assert all(side.ended.wait(DEADLINE_S) for side in sides)
    assert [(job.poll(), job.error) for job in jobs] == [(PostingState.DONE, "")] * 2
    assert np.array_equal(source.memory, destination.memory)
