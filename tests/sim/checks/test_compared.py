"""Unit tests of `Compared`, which decides what a liar's checksums allow a destination to use."""

import numpy as np
import pytest

from kvgrpc.core.actions import Operation, Post, SendChecksums
from kvgrpc.core.events import ChecksumsAnswered
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.errors import InternalError, KVGrpcError, Reason
from sim import Violated
from sim.checks.compared import Compared
from sim.world.memory import KvStore, Memory, layout, sum_of

LIAR = "liar@0000000000000001"
POOL = layout(4)
"""Pool in which a block of the fine group has two cells, 4 apart."""
SOURCE, HERE = 1, 2
"""Ids of the block that moves, at the source and here."""
FILLED = [HERE, HERE + 4]
REFUSED = InternalError(Reason.PEER_FAILED, "a lie")


def memory(kv: int = 7) -> Memory:
    made = Memory(POOL, 0, KvStore())
    for cell in FILLED:
        made.cells[cell] = kv
    return made


def told(kv: int = 7) -> bytes:
    return sum_of(memory(kv).cells, FILLED).to_bytes(4, "little")


def ids(*some: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(some, dtype=np.int64)


def moved(name: str = "mt/1") -> Compared:
    """Returns checks for which both cells have moved and the source was asked for the sum of their block."""
    compared = Compared()
    runs = Runs(ids(SOURCE, SOURCE + 4), ids(*FILLED), ids(1, 1))
    compared.posts(Post(0, "t/0", LIAR, runs, "t", Operation.READ))
    compared.asks(SendChecksums(LIAR, b"a" * 16, name, 0, (((ids(SOURCE), ids()), None),), ""), POOL)
    return compared


def answered(compared: Compared, result: tuple[bytes, ...] | KVGrpcError, name: str = "mt/1") -> None:
    compared.hears(ChecksumsAnswered(name, 0, result))
    compared.settles("t")
    compared.check("t", [memory()])


def test_what_arrived_as_its_source_says_is_used() -> None:
    answered(moved(), (told(),))


def test_what_arrived_as_something_else_is_not_used() -> None:
    with pytest.raises(Violated, match="t holds other KV in cells"):
        answered(moved(), (told(8),))


@pytest.mark.parametrize(
    "result", [REFUSED, (), (b"",), (told() * 2,), (told()[:3],)], ids=["refused", "no rank", "none", "more", "cut"]
)
def test_what_no_checksum_came_for_is_not_used(result: tuple[bytes, ...] | KVGrpcError) -> None:
    with pytest.raises(Violated, match="t brought 2 cells of which its source told no checksum"):
        answered(moved(), result)


def test_checksums_of_another_round_count_for_nothing() -> None:
    with pytest.raises(Violated, match="told no checksum"):
        answered(moved(), (told(),), "mt/0")


def test_a_block_that_was_not_asked_for_is_not_used() -> None:
    compared = moved()
    compared.posts(Post(0, "t/0", LIAR, Runs(ids(0), ids(0), ids(1)), "t", Operation.READ))
    with pytest.raises(Violated, match="t brought 1 cells"):
        answered(compared, (told(),))


def test_what_starts_over_counts_for_nothing() -> None:
    compared = moved()
    compared.settles("t")
    compared.forget("t")
    compared.check("t", [memory()])


def test_every_rank_has_checksums_of_its_own() -> None:
    compared = moved()
    runs = Runs(ids(SOURCE, SOURCE + 4), ids(*FILLED), ids(1, 1))
    compared.posts(Post(1, "t/1", LIAR, runs, "t", Operation.READ))
    compared.hears(ChecksumsAnswered("mt/1", 0, (told(), told(8))))
    compared.settles("t")
    compared.check("t", [memory(), memory(8)])
    with pytest.raises(Violated):
        compared.check("t", [memory(), memory()])
