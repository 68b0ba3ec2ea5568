"""The library's threads and descriptors for a group are released when the other half never comes."""

import secrets
import socket
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.datapath.collective import gloo as library
from kvgrpc.datapath.collective.group import SENDER
from kvgrpc.datapath.collective.half import CONNECTIONS, TOKEN_BYTES, Half as Told, read_half
from kvgrpc.datapath.host.memory import PrivateMemory
from tests.datapath.collective.conftest import Made, gloo
from tests.datapath.halves import Half
from tests.datapath.movers import until
from tests.datapath.peers import DEADLINE_S, open_descriptors
from tests.datapath.pumped import HOST

SHORT_S = 0.5
LOWEST, HIGHEST = 1, 65_535
"""Ports: of two halves on one host, the one with the higher port connects to the other one."""
GROUPS = 5


def held() -> tuple[int, int]:
    """Returns the number of threads and of descriptors of this process."""
    return len(list(Path("/proc/self/task").iterdir())), open_descriptors()


def no_more_than(before: tuple[int, int]) -> bool:
    """Tells whether no more are held; fewer are fine, since threads of earlier tests may end meanwhile."""
    return all(now <= was for now, was in zip(held(), before, strict=True))


@pytest.fixture
def loaded(made: Made) -> None:
    """Loads the library, with all that it keeps for good."""
    halves, _, _ = made
    halves.meet()
    halves.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "CONNECT_S", SHORT_S)
    monkeypatch.setattr(library, "PROOF_S", SHORT_S)


@pytest.fixture
def silent() -> Iterator[int]:
    """Makes a port at which connections are accepted and nothing is said."""
    listener = socket.create_server((HOST, 0))
    with listener:
        yield int(listener.getsockname()[1])


def dead(port: int) -> Told:
    return Told(secrets.token_bytes(TOKEN_BYTES), ((socket.inet_aton(HOST), port),) * CONNECTIONS)


def begin(*, sends: bool) -> Half:
    return Half(partial(gloo, sends), PrivateMemory.of(np.zeros(8, dtype=np.uint8)).segments, sends=sends)


def ports_of(half: Half) -> list[int]:
    half.wait_told()
    return [port for _, port in read_half(half.values, HOST).addresses]


@pytest.mark.usefixtures("loaded", "impatient")
@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("where", ["nobody listens", "nobody comes", "somebody says nothing"])
def test_a_group_whose_other_half_is_dead_leaves_no_thread_and_no_descriptor(
    where: str, silent: int, *, sends: bool
) -> None:
    port = {"nobody listens": LOWEST, "nobody comes": HIGHEST, "somebody says nothing": silent}[where]
    before = held()
    begun = [begin(sends=sends) for _ in range(GROUPS)]
    for half in begun:
        half.group.learn(dead(port).values)
    for half in begun:
        assert half.group.join(DEADLINE_S)
        assert half.group.broken
        assert not half.group.made
    until(lambda: no_more_than(before))


@pytest.mark.usefixtures("loaded", "impatient")
def test_who_connects_and_says_nothing_takes_no_more_than_who_does_not_come() -> None:
    before = held()
    half = begin(sends=False)
    (port, *_) = ports_of(half)
    with socket.create_connection((HOST, port), timeout=DEADLINE_S) as guest:
        guest.sendall(struct.pack("=Q", SENDER))
        half.group.learn(dead(HIGHEST).values)
        assert half.group.join(DEADLINE_S)
        assert "Timed out" in half.group.broken
        assert guest.recv(1_024) is not None
    until(lambda: no_more_than(before))


@pytest.mark.usefixtures("loaded", "impatient")
def test_who_comes_when_a_group_has_given_up_meets_nobody() -> None:
    half = begin(sends=True)
    ports = ports_of(half)
    half.group.learn(dead(HIGHEST).values)
    assert half.group.join(DEADLINE_S)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=DEADLINE_S)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("values", [(), (("token", b""),), dead(LOWEST).values[:2]])
def test_a_half_that_is_none_ends_the_group_that_waited_for_it(values: tuple[tuple[str, bytes], ...]) -> None:
    before = held()
    half = begin(sends=False)
    half.wait_told()
    half.group.learn(values)
    assert half.group.join(DEADLINE_S)
    assert "half of a process group" in half.group.broken
    until(lambda: no_more_than(before))
