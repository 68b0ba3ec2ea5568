"""A rogue names memory of another process, over path cma: the pull fails, and nothing of that memory is read."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.datapath.host.process import _ADDRESSES
from kvgrpc.v1 import common_pb2, handshake_pb2, pool_types_pb2
from tests.service.conftest import SETTINGS, SHARED
from tests.service.engines import FAILED, RETURNED, Engine, ServeProcess
from tests.service.rogue import Rogue
from tests.service.values import prompt

TOKENS = prompt(40)
CMA = tuple("cma" if flag == "shm" else flag for flag in SHARED)
BYSTANDER = """
import ctypes, json, socket, sys
nbytes = int(sys.argv[1])
memory = ctypes.create_string_buffer(b"\\x5c" * nbytes + bytes(4096))
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("")
listener.listen()
print(json.dumps({"address": ctypes.addressof(memory), "name": listener.getsockname()[1:].decode()}), flush=True)
while True:
    client, _ = listener.accept()
    client.recv(100)
    client.send(bytes.fromhex(sys.stdin.readline()))
    client.close()
"""
"""A process that sends any answer at its socket, and has zeros in its memory in place of a proof."""


@pytest.fixture(scope="module")
def victim_flags() -> tuple[str, ...]:
    return CMA


def pull_fails(victim: Engine, rogue: Rogue, change: Callable[[pool_types_pb2.RankEndpoint], None]) -> str:
    """Checks that a pull fails in the handshake with its blocks unchanged, and returns the message."""

    def names(reply: Any) -> None:
        reply.endpoints[0].ClearField("shm")
        change(reply.endpoints[0])

    rogue.changes["Handshake"] = names
    target = victim.allocate(3)
    before = victim.write(target, seed=1)
    pulled = victim.pull(rogue.grant(40), TOKENS, target)
    end = victim.wait(pulled.transfer_id)
    assert (end.state, end.memory, end.failure.phase) == (
        FAILED,
        RETURNED,
        common_pb2.TRANSFER_PHASE_HANDSHAKE,
    )
    assert end.failure.reason == common_pb2.FAILURE_REASON_NO_DATA_PATH
    assert victim.read(target) == before
    return end.failure.message


def given_to(rogue: Rogue, engine: Engine) -> pool_types_pb2.CmaEndpoint:
    """Returns what an engine tells the rogue about its memory in a handshake."""
    request = handshake_pb2.HandshakeRequest(
        engine=rogue.engine, endpoints=[pool_types_pb2.RankEndpoint(rank=0)], proof=bytes(32)
    )
    return engine.api.handshake.Handshake(request).endpoints[0].cma


def test_the_memory_of_a_bystander_that_the_rogue_names_is_not_read(victim: Engine, rogue: Rogue) -> None:
    nbytes = rogue.engine.pool.total_bytes
    command = [sys.executable, "-c", BYSTANDER, str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bystander:
        assert bystander.stdin is not None
        assert bystander.stdout is not None
        said = json.loads(bystander.stdout.readline())
        zeros = said["address"] + nbytes
        bystander.stdin.write(_ADDRESSES.pack(zeros, zeros).hex().join(("00", "\n")))
        bystander.stdin.flush()

        def names(endpoint: pool_types_pb2.RankEndpoint) -> None:
            endpoint.cma.process.socket_path = f"@{said['name']}"
            endpoint.cma.process.token = bytes(32)
            endpoint.cma.segments.add(address=said["address"], size_bytes=nbytes)

        assert f"process {bystander.pid} is not the peer" in pull_fails(victim, rogue, names)
        bystander.kill()


def test_the_victim_s_own_memory_is_not_read(victim: Engine, rogue: Rogue) -> None:
    given = given_to(rogue, victim)
    assert "this very one" in pull_fails(victim, rogue, lambda endpoint: endpoint.cma.CopyFrom(given))


def test_another_engine_s_memory_is_not_read_but_for_its_pool(victim: Engine, rogue: Rogue, tmp_path: Path) -> None:
    other = Engine(ServeProcess(tmp_path, *CMA, settings=SETTINGS))
    given = given_to(rogue, other)
    given.segments[0].address -= 1 << 20
    message = pull_fails(victim, rogue, lambda endpoint: endpoint.cma.CopyFrom(given))
    assert f"process {other.process.pid} is not the peer" in message
    other.reset()
    other.close()
