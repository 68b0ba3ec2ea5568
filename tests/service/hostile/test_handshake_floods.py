"""Floods of handshakes, of one caller or of ever new ones: known peers stay, and a new honest peer connects in time."""

import contextlib
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.core.values.limits import Limits
from kvgrpc.v1 import admin_pb2, handshake_pb2, pool_types_pb2
from tests.service.conftest import SETTINGS, SHARED
from tests.service.engines import SUCCEEDED, Engine, ServeProcess
from tests.service.values import prompt

TOKENS = prompt(40)
IN_TIME_S = 5.0
"""Time limit for a handshake and a pull of three blocks, in seconds. They take 0.1 s."""
AT_ONCE = 32
CONNECTED = handshake_pb2.PEER_STATE_CONNECTED


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    """Yields the victim, a peer that it knows, and a peer that it does not know yet."""
    names = ("victim", "known", "new")
    made = [Engine(ServeProcess(tmp_path / name, *SHARED, settings=SETTINGS)) for name in names]
    yield made
    for engine in made:
        engine.close()


class Strangers:
    """A maker of handshakes with an engine, each in the name of a given life."""

    def __init__(self, victim: Engine) -> None:
        self._victim = victim
        self._engine = victim.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest()).engine
        self._engine.address = ""
        self._under_way: deque[Any] = deque()
        self.refused = 0

    def shake(self, engine_id: str, incarnation: int, socket_path: str = "@nobody") -> None:
        request = handshake_pb2.HandshakeRequest(engine=self._engine, proof=secrets.token_bytes(32))
        request.engine.engine_id, request.engine.incarnation = engine_id, incarnation
        request.endpoints.append(pool_types_pb2.RankEndpoint(rank=0))
        shm = request.endpoints[0].shm
        shm.socket_path, shm.token, shm.nonce = socket_path, bytes(32), bytes(32)
        shm.size_bytes = shm.nonce_offset = 4096
        if len(self._under_way) == AT_ONCE:
            self._take()
        self._under_way.append(self._victim.api.handshake.Handshake.future(request, timeout=30))

    def _take(self) -> None:
        try:
            self._under_way.popleft().result()
        except grpc.RpcError:
            self.refused += 1

    def wait(self) -> None:
        while self._under_way:
            self._take()


@contextlib.contextmanager
def silent_socket() -> Iterator[str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen(4096)
        yield "@" + listener.getsockname()[1:].decode()


def meet(source: Engine, destination: Engine) -> float:
    """Returns the seconds that a pull takes, with a handshake if the two do not know each other."""
    handed_over = source.hand_over(TOKENS)
    target = destination.allocate(3)
    began = time.monotonic()
    pulled = destination.pull(handed_over.grant, TOKENS, target)
    end = destination.wait(pulled.transfer_id)
    took_s = time.monotonic() - began
    assert end.state == SUCCEEDED, end.failure
    destination.free(target)
    return took_s


def peer_of(engine: Engine, other: Engine) -> handshake_pb2.Peer:
    found = engine.api.admin.ListPeers(admin_pb2.ListPeersRequest(page_size=1000)).peers
    return next(peer for peer in found if peer.engine_id == other.engine_id)


@pytest.mark.parametrize("strangers", [60, 600])
def test_sockets_that_never_answer_keep_no_new_peer_waiting(engines: list[Engine], strangers: int) -> None:
    victim, known, new = engines
    assert meet(known, victim)
    flood = Strangers(victim)
    with silent_socket() as path:
        for i in range(strangers):
            flood.shake(f"stranger-{i}", 1, path)
        flood.wait()
        assert meet(new, victim) < IN_TIME_S
        assert meet(known, victim) < IN_TIME_S


@pytest.mark.parametrize("lives", [1, 4200], ids=["of one life", "each of a new life"])
def test_one_caller_s_handshakes_use_up_no_token_of_others(engines: list[Engine], lives: int) -> None:
    victim, known, new = engines
    assert meet(victim, known)
    flood = Strangers(victim)
    for i in range(4200):
        flood.shake("stranger", 1 + i % lives)
    flood.wait()
    assert meet(victim, new) < IN_TIME_S
    assert meet(victim, known) < IN_TIME_S


def test_ever_new_callers_take_no_place_of_a_known_peer_nor_of_an_honest_new_one(engines: list[Engine]) -> None:
    victim, known, new = engines
    assert meet(victim, known)
    flood = Strangers(victim)
    for _ in range(Limits().peers + 200):
        flood.shake(f"stranger-{secrets.token_hex(8)}", 1)
    flood.wait()
    assert flood.refused == 0
    assert meet(victim, new) < IN_TIME_S
    assert peer_of(victim, known).state == CONNECTED
    assert meet(victim, known) < IN_TIME_S
