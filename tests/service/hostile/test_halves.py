"""A peer that asks for process groups and never connects: a rank keeps a bounded number of them, for a short time."""

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence

import grpc
import pytest

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.collective.group import DESCRIPTORS
from kvgrpc.datapath.collective.half import CONNECTIONS
from kvgrpc.datapath.collective.unmade_groups import OF_PAIR_MAX
from kvgrpc.peer.v1 import peer_pb2
from tests.service.conftest import starting
from tests.service.consumer import Consumer
from tests.service.engines import WAIT_S, Engine, wait_until
from tests.service.footprint import POOL_THREADS_MAX, footprint
from tests.service.halves import dead, in_rows
from tests.service.receiver import Receiver

ASKS = 300
THREADS_OF_A_GROUP = 1 + CONNECTIONS
SHAPELESS: Sequence[Values] = (
    (),
    (("0", b""),),
    tuple((key, secrets.token_bytes(40)) for key in ("token", "0", "1")),
    tuple((key, secrets.token_bytes(160)) for key in ("token/1", "0/0/1", "1/0/1")),
)


def ask(sender: Engine, consumer: Consumer, epoch: int, values: Values) -> str:
    """Asks for a process group. Returns the error text, or "" if the group is being made."""
    try:
        consumer.ask(peer_pb2.PostSendRequest(epoch=epoch, values=in_rows(values)))
    except grpc.RpcError as error:
        return str(error.details())
    return ""


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yields a source that sends, and has sent before."""
    with starting(tmp_path_factory.mktemp("sender")) as start:
        (engine,) = start(("--data-paths", "collective"))
        serve(engine)
        yield engine


def serve(engine: Engine) -> None:
    """Serves an honest peer, which then leaves."""
    honest = Consumer(engine)
    honest.handshake()
    Receiver(honest).close()


def attack(sender: Engine, half: Callable[[int], Values]) -> tuple[int, int]:
    """Attacks with one life of a peer, which then stays silent. Returns the most threads and descriptors taken."""
    before = footprint(sender.process.pid)
    hostile, threads, descriptors = Consumer(sender), 0, 0
    hostile.handshake()
    for epoch in range(1, ASKS + 1):
        ask(sender, hostile, epoch, half(epoch))
        now = footprint(sender.process.pid)
        threads = max(threads, now.threads - before.threads)
        descriptors = max(descriptors, now.descriptors.total() - before.descriptors.total())
    return threads, descriptors


def test_halves_that_are_none_cost_a_rank_nothing(sender: Engine) -> None:
    before = footprint(sender.process.pid)
    shapes = itertools.cycle(SHAPELESS)
    attack(sender, lambda _: next(shapes))
    assert footprint(sender.process.pid).no_more_than(before)
    serve(sender)


@pytest.mark.parametrize("port", [1, 65_535])
def test_dead_halves_cost_a_rank_a_few_groups_at_a_time_and_nothing_when_they_are_over(
    sender: Engine, port: int
) -> None:
    before = footprint(sender.process.pid)
    threads, descriptors = attack(sender, lambda _: dead(port))
    assert threads <= OF_PAIR_MAX * THREADS_OF_A_GROUP + POOL_THREADS_MAX
    assert descriptors <= OF_PAIR_MAX * DESCRIPTORS
    serve(sender)
    wait_until(lambda: footprint(sender.process.pid).no_more_than(before), WAIT_S)
    serve(sender)
