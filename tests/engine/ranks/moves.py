"""Moves between two engines of two ranks."""

from dataclasses import dataclass

from kvgrpc.client import name_of
from kvgrpc.engine import BlocksReturned, Push, Received, Reservation, Reserved, content
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.errors import Reason
from kvgrpc.v1 import common_pb2
from tests.engine.made import BLOCKS
from tests.engine.private_side import PrivateSide
from tests.engine.support import new_key, received, tokens
from tests.service.engines import wait_until

PROMPT, SOURCE, TARGET = tokens(40), [1, 2, 9], [30, 31, 5]
OTHERS = [block for block in range(BLOCKS) if block not in TARGET]
GRACE_S = 2.0
"""Grace after which an impatient lead declares a rank dead, in seconds."""
LONG, MANY = tokens(16 * (BLOCKS - 4), seed=1), list(range(BLOCKS - 4))
"""A prompt and blocks whose move is long enough to be interrupted."""
SLOW_BYTES_PER_S = 40e3
"""Limit of a slow rank, in bytes per second. A rank's part of a long move has 120 kB, moved 4 kB at a time."""
LOST = {Reason.DATA_PATH_FAILED, Reason.INCARNATION_CHANGED, Reason.PEER_LOST, Reason.SOURCE_FAILED}


@dataclass(frozen=True)
class Way:
    """A data path, and which side writes."""

    path: str
    source_writes: bool = False


WAYS = [Way("cma"), Way("nixl"), Way("nixl", source_writes=True), Way("collective")]
NAMES = ["cma", "nixl", "nixl-writes", "collective"]


def begun(
    source: PrivateSide, destination: PrivateSide, target: list[int], prompt: list[int]
) -> tuple[Push, Reservation]:
    """Returns both ends of a push after registering its destination."""
    key = new_key()
    reservation = destination.engine.reserve(target, content(prompt), transfer_key=key)
    assert destination.poll_until(bool) == [Reserved(reservation)]
    push = source.engine.push(content(prompt), transfer_key=key)
    push.register(reservation.grant)
    return push, reservation


def moved_by(side: PrivateSide, handle: Handle) -> list[tuple[int, str]]:
    """Returns (rank, data path) for each rank that moved bytes of a transfer."""
    paths = side.lead.transfer(handle.transfer_id).paths
    return [(row.rank, name_of(common_pb2.DataPath, row.data_path)) for row in paths]


def pulled(source: PrivateSide, destination: PrivateSide) -> tuple[Handle, Handle]:
    """Starts a long pull and returns its two ends."""
    handover = source.hand_over(MANY, LONG, ttl_s=300.0)
    pull = destination.engine.pull(handover.grant, content(LONG))
    pull.start(MANY)
    return handover, pull


def pushed(source: PrivateSide, destination: PrivateSide) -> tuple[Handle, Handle]:
    """Starts a long push and returns its two ends."""
    push, reservation = begun(source, destination, MANY, LONG)
    push.finished(MANY, last=True)
    source.engine.flush()
    return push, reservation


def in_the_middle(source: PrivateSide, destination: PrivateSide, way: Way) -> tuple[Handle, Handle]:
    """Returns both ends of a move after rank 0 has moved all of its bytes, and the slow rank 1 only some."""
    expected, before = source.fill_all(MANY, 800), destination.read_all(MANY)
    given, taken = (pushed if way.source_writes else pulled)(source, destination)

    def half() -> bool:
        destination.engine.poll()
        zero, one = destination.read_all(MANY)
        return zero == expected[0] and one != before[1]

    wait_until(half)
    assert not taken.over
    return given, taken


def check_pull(source: PrivateSide, destination: PrivateSide, way: Way, seed: int) -> None:
    """Checks that a pull fills the target blocks of each rank, and no others."""
    untouched, expected = destination.fill_all(OTHERS, seed + 50), source.fill_all(SOURCE, seed)
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    received(destination.finish(pull))
    source.finish(handover)
    _check_filled(destination, expected, untouched)
    assert moved_by(destination, pull) == [(rank, way.path) for rank in range(2)]


def check_push(source: PrivateSide, destination: PrivateSide, way: Way, seed: int) -> None:
    """Checks that a push fills the target blocks of each rank, and no others."""
    untouched, expected = destination.fill_all(OTHERS, seed + 50), source.fill_all(SOURCE, seed)
    push, reservation = begun(source, destination, TARGET, PROMPT)
    push.finished(SOURCE, last=True)
    source.engine.flush()
    assert destination.poll_until(lambda _: reservation.over) == [Received(reservation, len(PROMPT))]
    assert source.poll_until(lambda _: push.over) == [BlocksReturned(push)]
    _check_filled(destination, expected, untouched)
    mover, handle = (source, push) if way.source_writes else (destination, reservation)
    assert moved_by(mover, handle) == [(rank, way.path) for rank in range(2)]


def _check_filled(destination: PrivateSide, expected: list[str], untouched: list[str]) -> None:
    assert destination.read_all(TARGET) == expected
    assert len(set(expected)) == 2, "each rank has bytes of its own"
    assert destination.read_all(OTHERS) == untouched
