"""Engines whose ranks are on other hosts than their leads: the leads on one host, the ranks of the source on a second
and those of the destination on a third one.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvgrpc.engine import Failed, Received, content
from kvgrpc.errors import Reason
from tests.engine.private_side import PrivateSide
from tests.engine.ranks.moves import LONG, LOST, MANY, SLOW_BYTES_PER_S, Way, begun, check_pull, check_push
from tests.engine.support import Lead, Workers
from tests.hosts import hosts
from tests.hosts.switched import CONDITIONS, Network, switched
from tests.service.engines import wait_until

LIMITS = {
    "lease_ttl_s": 6.0,
    "registration_timeout_s": 12.0,
    "transfer_timeout_s": 8.0,
    "queue_timeout_s": 8.0,
    "settle_timeout_s": 3.0,
    "peer_grace_s": 15.0,
}
"""Limits short enough that a cut is felt; a rank may be silent for longer than a move takes."""
UCX_TLS = {"nixl": "tcp", "collective": "^sm"}


class RemoteRanks:
    """Two engines of two ranks each."""

    def __init__(self, network: Network, leads: list[Lead], makers: list[Workers], path: str) -> None:
        self.network = network
        self.path = path
        self.leads = leads
        self._makers = makers

    def sides(self, stack: ExitStack, *, slow: bool = False) -> tuple[PrivateSide, PrivateSide]:
        """Attaches the source and the destination, until the stack ends."""
        made = []
        for lead, maker in zip(self.leads, self._makers, strict=True):
            limits = (SLOW_BYTES_PER_S if slow else None,) * 2
            workers = [maker.make(), maker.make()]
            made.append(PrivateSide(lead, workers, self.path, remote={0: "", 1: ""}, limits=limits))
            stack.callback(made[-1].close)
        return made[0], made[1]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with switched(3) as made:
        if isinstance(made, str):
            pytest.skip(made)
        yield made


@pytest.fixture(scope="module", params=UCX_TLS)
def ranks(
    request: pytest.FixtureRequest, network: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RemoteRanks]:
    folder, first = tmp_path_factory.mktemp("leads"), network.hosts[0]
    flags = ("--listen", f"{first.address}:0", "--insecure", "--dial-allow", f"{hosts.NETWORK}.0/24")
    settings = "\n".join(["[limits]", *(f"{name} = {value}" for name, value in LIMITS.items())])
    with ExitStack() as stack:
        leads = [Lead(folder, name, *flags, settings=settings, within=first.within) for name in ("P", "D")]
        for lead in leads:
            stack.callback(lead.close)
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("UCX_TLS", UCX_TLS[request.param])
        makers = []
        for host in network.hosts[1:]:
            environment.setenv("UCX_NET_DEVICES", host.device)
            makers.append(Workers(within=host.within))
            stack.callback(makers[-1].close)
        yield RemoteRanks(network, [lead.wait_ready() for lead in leads], makers, request.param)


@pytest.fixture
def stack(ranks: RemoteRanks) -> Iterator[ExitStack]:
    """Yields a stack of engines. Afterwards both leads come to rest by themselves, and lose their engines."""
    with ExitStack() as made:
        yield made
        ranks.network.set()
        for lead in ranks.leads:
            wait_until(lead.at_rest, what=lead.status)
    for lead in ranks.leads:
        lead.wait_no_engine()


def test_pulls_and_pushes_bring_every_rank_its_bytes_on_each_network(
    ranks: RemoteRanks, stack: ExitStack, subtests: pytest.Subtests
) -> None:
    source, destination = ranks.sides(stack)
    for seed, (name, condition) in enumerate(CONDITIONS.items()):
        with subtests.test(name):
            ranks.network.set(**condition)
            check_pull(source, destination, Way(ranks.path), 100 * seed)
            check_push(source, destination, Way(ranks.path), 100 * seed + 50)


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_a_partition_between_ranks_fails_what_crosses_it_and_their_engines_go_on(
    ranks: RemoteRanks, stack: ExitStack, kind: str
) -> None:
    source, destination = ranks.sides(stack, slow=True)
    source.fill_all(MANY, 800)
    before = destination.read_all(MANY)
    if kind == "pull":
        given: Any = source.hand_over(MANY, LONG)
        move: Any = destination.engine.pull(given.grant, content(LONG))
        move.start(MANY)
    else:
        given, move = begun(source, destination, MANY, LONG)
        given.finished(MANY, last=True)
        source.engine.flush()
    wait_until(lambda: not destination.engine.poll() and destination.read_all(MANY) != before)
    ranks.network.set(cut=[(ranks.network.hosts[1], ranks.network.hosts[2])])
    failed = destination.poll_until(bool)[-1]
    assert isinstance(failed, Failed)
    assert failed.reason in {*LOST, Reason.TRANSFER_TIMEOUT}, failed
    ranks.network.set()
    destination.poll_until(lambda _: move.over)  # its blocks are out of quarantine
    source.poll_until(lambda _: given.over)
    check_pull(source, destination, Way(ranks.path), 300)


def test_a_short_cut_between_a_rank_and_its_lead_ends_nothing(ranks: RemoteRanks, stack: ExitStack) -> None:
    source, destination = ranks.sides(stack, slow=True)
    expected, before = source.fill_all(MANY, 800), destination.read_all(MANY)
    handover = source.hand_over(MANY, LONG)
    pull = destination.engine.pull(handover.grant, content(LONG))
    pull.start(MANY)
    wait_until(lambda: not destination.engine.poll() and destination.read_all(MANY) != before)
    ranks.network.set(cut=[(ranks.network.hosts[0], ranks.network.hosts[2])])
    if ranks.path == "nixl":  # all bytes arrive, and their end cannot be told; over collective, leads ask for each send
        wait_until(lambda: destination.read_all(MANY) == expected)
    assert not pull.over
    ranks.network.set()
    events = destination.poll_until(lambda _: pull.over)
    assert isinstance(events[-1], Received), events
