"""A survivor frees what it holds of a dead peer, at the latest after the grace: with shm the mapping and the descriptor
of its pool, with NIXL the descriptor of its process and its connections.
"""

from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from kvgrpc.v1 import handshake_pb2, pool_types_pb2
from tests.e2e.conftest import PATHS
from tests.e2e.slow_pulls import LIMITS, SLOW, begin_slow_pull, check_a_good_pull
from tests.service.conftest import Start
from tests.service.engines import Engine, meet, wait_until
from tests.service.footprint import footprint

SOON_S = 15.0
"""Five times the grace of LIMITS, in seconds."""


def held(engine: Engine) -> tuple[int, int]:
    """Returns the numbers of mappings and of descriptors of pools that a server has, including its own pool."""
    proc = Path(f"/proc/{engine.process.pid}")
    descriptors = 0
    for link in (proc / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            descriptors += "kvgrpc-pool" in str(link.readlink())
    return (proc / "maps").read_text().count("memfd:kvgrpc-pool"), descriptors


@pytest.mark.parametrize("moving", [False, True], ids=["idle", "bytes on their way"])
@pytest.mark.parametrize("victim", ["source", "destination"])
def test_the_memory_of_a_dead_peer_is_not_kept(start: Start, victim: str, moving: bool) -> None:
    source, destination = start(("--data-paths", "shm"), ("--data-paths", "shm", *SLOW), settings=LIMITS)
    alone = held(source), held(destination)
    meet(source, destination)
    check_a_good_pull(source, destination)
    assert held(source) > alone[0]
    assert held(destination) > alone[1]
    if moving:
        begin_slow_pull(source, destination)
    dead, survivor, before = (source, destination, alone[1]) if victim == "source" else (destination, source, alone[0])
    dead.process.kill()
    wait_until(lambda: held(survivor) == before, SOON_S, lambda: (before, held(survivor)))


def offer_once(engine: Engine) -> None:
    """Handshakes once as a stranger, so that the long-lived state for answering peers exists."""
    described = engine.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest()).engine
    described.engine_id, described.address = "stranger", ""
    request = handshake_pb2.HandshakeRequest(
        engine=described, endpoints=[pool_types_pb2.RankEndpoint(rank=0)], proof=bytes(32)
    )
    engine.api.handshake.Handshake(request)


def connected(engine: Engine) -> Counter[str]:
    """Returns a server's descriptors by kind, once a test is connected to it."""
    engine.check_alive()
    return footprint(engine.process.pid).descriptors


@pytest.mark.parametrize("path", ["nixl", pytest.param("nixl-tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", ["source", pytest.param("destination", marks=pytest.mark.slow)])
def test_what_nixl_has_of_a_dead_peer_is_not_kept(start: Start, victim: str, path: str) -> None:
    flags, environment = PATHS[path]
    source, destination = start(flags, (*flags, *SLOW), settings=LIMITS, **environment)
    dead, survivor = (source, destination) if victim == "source" else (destination, source)
    offer_once(survivor)
    alone = connected(survivor)
    meet(source, destination)
    check_a_good_pull(source, destination)
    met = connected(survivor) - alone
    assert met.total() > met["socket:"] > 0
    begin_slow_pull(source, destination)
    dead.process.kill()
    wait_until(lambda: not connected(survivor) - alone, SOON_S, lambda: connected(survivor) - alone)
