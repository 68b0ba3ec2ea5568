"""The memory of a dead peer goes from the survivor, at the latest when the grace is over: mapping and descriptor."""

from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.test_deaths import LIMITS, SLOW, begin_slow_pull, check_a_good_pull
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until

SOON_S = 5.0
"""Eight times the grace of LIMITS."""


def held(engine: Engine) -> tuple[int, int]:
    """Mappings and descriptors of pools that a server has; of its own pool, too."""
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
    check_a_good_pull(source, destination)
    assert held(source) > alone[0]
    assert held(destination) > alone[1]
    if moving:
        begin_slow_pull(source, destination)
    dead, survivor, before = (source, destination, alone[1]) if victim == "source" else (destination, source, alone[0])
    dead.process.kill()
    wait_until(lambda: held(survivor) == before, SOON_S, lambda: (before, held(survivor)))
