"""Engines with ranks on two hosts, which are network namespaces: bytes between hosts go by NIXL over TCP.

Where no namespace can be made, tests/engine/ranks/test_remote_ranks.py does the same on the loopback device.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvgrpc.engine import BlocksReturned, Received, content
from tests.engine.conftest import SETTINGS
from tests.engine.private_side import PrivateSide
from tests.engine.ranks.moves import LONG, MANY, PROMPT, SLOW_BYTES_PER_S, SOURCE, TARGET, begun, moved_by
from tests.engine.support import Asked, Lead, Workers, lead_died, received
from tests.hosts import hosts
from tests.service.conftest import TEST_S
from tests.service.engines import wait_until

pytestmark = pytest.mark.timeout(TEST_S)

GRACE_S = 3.0
FLAGS = ("--listen", f"{hosts.FIRST.address}:0", "--insecure", "--dial-allow", f"{hosts.NETWORK}.0/24")


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[None]:
    with hosts.two_hosts() as why_not:
        if why_not:
            pytest.skip(why_not)
        yield


@pytest.fixture(scope="module")
def leads(two_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lead, Lead]]:
    """Yields two leads, both on the first host."""
    folder = tmp_path_factory.mktemp("leads")
    settings = SETTINGS.replace("peer_grace_s = 30.0", f"peer_grace_s = {GRACE_S}")
    with ExitStack() as stack:
        made = [Lead(folder, name, *FLAGS, settings=settings, within=hosts.FIRST.within) for name in ("P", "D")]
        for lead in made:
            stack.callback(lead.close)
        yield made[0].wait_ready(), made[1].wait_ready()


@pytest.fixture(scope="module")
def makers(two_hosts: None) -> Iterator[tuple[Workers, Workers]]:
    """Yields makers of workers, one for each host. Each host has one network."""
    with pytest.MonkeyPatch.context() as environment, ExitStack() as stack:
        environment.setenv("UCX_TLS", "tcp")
        made = []
        for host in hosts.BOTH:
            environment.setenv("UCX_NET_DEVICES", host.device)
            made.append(Workers(within=host.within))
            stack.callback(made[-1].close)
        yield made[0], made[1]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def engine(
    stack: ExitStack, lead: Lead, makers: tuple[Workers, Workers], places: tuple[int, int], slow: bool = False
) -> PrivateSide:
    """Attaches an engine. `places` gives each rank's host: 0 is the leads' host, 1 is the second one."""
    workers: list[Asked] = [makers[place].make() for place in places]
    remote = {rank: "" for rank, place in enumerate(places) if place}
    limits = tuple(SLOW_BYTES_PER_S if slow and place else None for place in places)
    side = PrivateSide(lead, workers, "cma", "nixl", remote=remote, limits=limits)
    stack.callback(side.close)
    return side


@pytest.mark.usefixtures("two_hosts")
def test_no_test_beside_these_finds_their_network() -> None:
    """A UCX agent finds the devices of its host that have an address when it begins, and connects over the fastest."""
    assert hosts.NETWORK not in hosts.ip("-o", "address")
    for host in hosts.BOTH:
        assert hosts.ip("-o", "address", "show", "dev", host.way) == ""


@pytest.mark.parametrize(
    ("there_too", "path"), [((1, 0), "nixl"), ((0, 1), "cma")], ids=["between hosts", "within each host"]
)
def test_a_rank_on_another_host_is_pulled_from_and_pulled_into(
    stack: ExitStack, leads: tuple[Lead, Lead], makers: tuple[Workers, Workers], there_too: tuple[int, int], path: str
) -> None:
    source, destination = engine(stack, leads[0], makers, (0, 1)), engine(stack, leads[1], makers, there_too)
    for seed in (100, 200):
        expected = source.fill_all(SOURCE, seed)
        untouched = destination.read_all([29, 32, 4])
        handover = source.hand_over(SOURCE, PROMPT)
        pull = destination.engine.pull(handover.grant, content(PROMPT))
        pull.start(TARGET)
        received(destination.finish(pull))
        source.finish(handover)
        assert destination.read_all(TARGET) == expected
        assert moved_by(destination, pull) == [(0, path), (1, path)]

        expected = source.fill_all(SOURCE, seed + 10)
        push, reservation = begun(source, destination, TARGET, PROMPT)
        push.finished(SOURCE, last=True)
        source.engine.flush()
        assert destination.poll_until(lambda _, r=reservation: r.over)[-1] == Received(reservation, len(PROMPT))  # type: ignore[misc]
        assert source.poll_until(lambda _, p=push: p.over) == [BlocksReturned(push)]  # type: ignore[misc]
        assert destination.read_all(TARGET) == expected
        assert destination.read_all([29, 32, 4]) == untouched


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_rank_on_another_host_that_is_lost_within_a_read_ends_its_engine_and_frees_the_source(
    stack: ExitStack, leads: tuple[Lead, Lead], makers: tuple[Workers, Workers], how: str
) -> None:
    source, destination = engine(stack, leads[0], makers, (0, 1)), engine(stack, leads[1], makers, (0, 1), slow=True)
    expected, before = source.fill_all(MANY, 800), destination.read_all(MANY)
    handover = source.hand_over(MANY, LONG, ttl_s=300.0)
    pull = destination.engine.pull(handover.grant, content(LONG))
    pull.start(MANY)

    def half() -> bool:
        destination.engine.poll()
        zero, one = destination.read_all(MANY)
        return zero == expected[0] and one != before[1]

    wait_until(half)
    if how == "killed":
        destination.workers[1].kill()
        assert "worker of rank 1 is gone" in lead_died(destination).message
        source.poll_until(lambda _: handover.over)
    else:
        hosts.cut()
        stack.callback(hosts.mend)
        # The kernel may report before the end of the grace that there is no route.
        assert "worker of rank 1" in lead_died(destination).message
        lead_died(source)  # its rank on the second host is cut off, too
        hosts.mend()
        for worker in (source.workers[1], destination.workers[1]):
            wait_until(lambda worker=worker: worker.ask(op="step_done", step=1) == "LeadDied")  # type: ignore[misc]
    for lead in leads:
        wait_until(lead.at_rest, what=lead.status)
    leads[1].wait_no_engine()
