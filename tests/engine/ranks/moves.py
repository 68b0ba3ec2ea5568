"""Moves between two engines of two ranks."""

from dataclasses import dataclass

from kvgrpc.client import name_of
from kvgrpc.engine import Push, Reservation, Reserved, content
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.errors import Reason
from kvgrpc.v1 import common_pb2
from tests.engine.made import BLOCKS
from tests.engine.private_side import PrivateSide
from tests.engine.support import new_key, tokens

PROMPT, SOURCE, TARGET = tokens(40), [1, 2, 9], [30, 31, 5]
LONG, MANY = tokens(16 * (BLOCKS - 4), seed=1), list(range(BLOCKS - 4))
"""Long enough to be in the middle of."""
SLOW_BYTES_PER_S = 40e3
"""Of what is long, every rank moves 120 kB, 4 kB at a time."""
LOST = {Reason.DATA_PATH_FAILED, Reason.INCARNATION_CHANGED, Reason.PEER_LOST, Reason.SOURCE_FAILED}


@dataclass(frozen=True)
class Way:
    """How bytes move."""

    path: str
    source_writes: bool = False


WAYS = [Way("cma"), Way("nixl"), Way("nixl", source_writes=True)]
NAMES = ["cma", "nixl", "nixl-writes"]


def begun(
    source: PrivateSide, destination: PrivateSide, target: list[int], prompt: list[int]
) -> tuple[Push, Reservation]:
    """A push whose two sides know each other."""
    key = new_key()
    reservation = destination.engine.reserve(target, content(prompt), transfer_key=key)
    assert destination.poll_until(bool) == [Reserved(reservation)]
    push = source.engine.push(content(prompt), transfer_key=key)
    push.register(reservation.grant)
    return push, reservation


def moved_by(side: PrivateSide, handle: Handle) -> list[tuple[int, str]]:
    """Its ranks that moved bytes of a transfer, and over which path."""
    paths = side.lead.transfer(handle.transfer_id).paths
    return [(row.rank, name_of(common_pb2.DataPath, row.data_path)) for row in paths]


def pulled(source: PrivateSide, destination: PrivateSide) -> tuple[Handle, Handle]:
    """Both ends of a long pull."""
    handover = source.hand_over(MANY, LONG, ttl_s=300.0)
    pull = destination.engine.pull(handover.grant, content(LONG))
    pull.start(MANY)
    return handover, pull


def pushed(source: PrivateSide, destination: PrivateSide) -> tuple[Handle, Handle]:
    """Both ends of a long push."""
    push, reservation = begun(source, destination, MANY, LONG)
    push.finished(MANY, last=True)
    source.engine.flush()
    return push, reservation
