"""Servers whose peers get a window, and nothing of the pool: what ends with the lease, and who gets which window."""

from pathlib import Path

from tests.e2e.slow_pulls import BLOCKS, SLOW, TOKENS, begin_slow_pull, check_a_good_pull
from tests.service.conftest import Start
from tests.service.engines import FAILED, RETURNED, Engine

PATHS = ("--data-paths", "window")


def mapped(engine: Engine) -> set[str]:
    """Returns the names of kvgrpc's shared memory that a server maps, with its access."""
    lines = Path(f"/proc/{engine.process.pid}/maps").read_text().splitlines()
    return {
        f"{line.partition('/memfd:')[2].split()[0]} {line.split()[1]}" for line in lines if "/memfd:kvgrpc-" in line
    }


def test_a_lease_that_ends_closes_the_window_for_further_reads(start: Start) -> None:
    source, destination = start(PATHS, (*PATHS, *SLOW))
    lease_id, pulled = begin_slow_pull(source, destination)
    source.release(lease_id)
    end = destination.wait(pulled.transfer_id)
    assert (end.state, end.memory) == (FAILED, RETURNED)
    assert end.failure.message == "this access is not valid any more"
    check_a_good_pull(source, destination)


def test_a_grant_of_an_ended_lease_brings_no_byte(start: Start) -> None:
    source, destination = start(PATHS, PATHS)
    check_a_good_pull(source, destination)
    handed = source.hand_over(TOKENS)
    source.release(handed.lease.lease_id)
    target = destination.allocate(BLOCKS)
    before = destination.read(target)
    end = destination.wait(destination.pull(handed.grant, TOKENS, target).transfer_id)
    assert end.state == FAILED
    assert destination.read(target) == before


def test_a_peer_maps_its_window_read_only_and_no_pool_but_its_own(start: Start) -> None:
    source, destination = start(PATHS, PATHS)
    check_a_good_pull(source, destination)
    assert "kvgrpc-window r--s" in mapped(destination)
    assert {name for name in mapped(destination) if name.startswith("kvgrpc-pool")} == {"kvgrpc-pool rw-s"}
