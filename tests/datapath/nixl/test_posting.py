"""Postings of data path `nixl` on a scripted library, whose errors prove nothing about what was written."""

import threading

import numpy as np
import pytest

from kvgrpc.core.actions import Operation
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.nixl.posting import NixlPosting, NixlSlice
from tests.datapath.nixl.peer import nothing

PENDING, DONE, FAILED, UNPROVED = PostingState


class ScriptedTransfer:
    def __init__(self, *states: PostingState) -> None:
        self._states = list(states)
        self.released = False

    def post(self) -> tuple[PostingState, str]:
        return self.check()

    def check(self) -> tuple[PostingState, str]:
        state = self._states.pop(0)
        return state, "it broke" if state is PostingState.FAILED else ""

    def release(self) -> None:
        self.released = True


class ScriptedConnection:
    def __init__(self, transfers: list[ScriptedTransfer], after_an_error: PostingState) -> None:
        self.lock = threading.RLock()
        self.closed = False
        self._transfers = iter(transfers)
        self._after_an_error = after_an_error

    def prepare(self, piece: NixlSlice, operation: Operation) -> ScriptedTransfer:
        return next(self._transfers)

    def broke(self, error: str, operation: Operation) -> PostingState:
        return self._after_an_error

    def after_close(self, operation: Operation) -> PostingState:
        return UNPROVED if operation is Operation.WRITE else FAILED


def scripted(
    transfers: list[ScriptedTransfer], after_an_error: PostingState, operation: Operation = Operation.READ
) -> tuple[ScriptedConnection, NixlPosting]:
    connection = ScriptedConnection(transfers, after_an_error)
    empty = np.empty((1, 3), dtype=np.uint64)
    return connection, NixlPosting(connection, iter([NixlSlice(empty, "DRAM", empty, "DRAM")] * 3), nothing, operation)


def sliced(*transfers: tuple[int, ScriptedTransfer]) -> tuple[list[int], NixlPosting]:
    """Returns the list of parts that arrive, empty at first, and a posting whose slices belong to parts."""
    connection = ScriptedConnection([transfer for _, transfer in transfers], FAILED)
    empty = np.empty((1, 3), dtype=np.uint64)
    pieces = iter([NixlSlice(empty, "DRAM", empty, "DRAM", part) for part, _ in transfers])
    arrived: list[int] = []
    return arrived, NixlPosting(connection, pieces, nothing, Operation.READ, arrived.append)


def test_a_part_has_arrived_when_all_its_slices_have_in_any_order() -> None:
    at_once = [ScriptedTransfer(DONE) for _ in range(4)]
    late, later = ScriptedTransfer(PENDING, PENDING, PENDING, DONE), ScriptedTransfer(PENDING, PENDING, PENDING, DONE)
    arrived, posting = sliced(*zip((0, 0, 1), at_once, strict=False), (1, late), (2, at_once[3]), (3, later))
    seen = []
    while posting.poll() is PENDING:
        seen.append(tuple(arrived))
    assert seen == [(), (), (0,), (0,), (0, 2), (0, 2), (0, 2, 1)]
    assert (posting.poll(), arrived) == (DONE, [0, 2, 1, 3])


def test_of_a_posting_that_broke_no_part_arrives_any_more() -> None:
    arrived, posting = sliced((0, ScriptedTransfer(DONE)), (1, ScriptedTransfer(FAILED)), (2, ScriptedTransfer(DONE)))
    assert [posting.poll() for _ in range(3)] == [PENDING, FAILED, FAILED]
    assert arrived == [0], "just before the one that failed began"


@pytest.mark.parametrize("end", [FAILED, UNPROVED])
def test_a_broken_slice_ends_the_posting_only_when_the_other_has_ended_too(end: PostingState) -> None:
    first, second = ScriptedTransfer(PENDING, FAILED), ScriptedTransfer(PENDING, PENDING, DONE)
    _, posting = scripted([first, second], end)
    assert [posting.poll() for _ in range(4)] == [PENDING, PENDING, end, end]
    assert (first.released, second.released) == (True, True)


@pytest.mark.parametrize(("operation", "end"), [(Operation.READ, FAILED), (Operation.WRITE, UNPROVED)])
def test_an_error_that_proves_nothing_ends_a_posting_only_at_close(operation: Operation, end: PostingState) -> None:
    transfers = [ScriptedTransfer(PENDING, FAILED), ScriptedTransfer(PENDING, DONE)]
    connection, posting = scripted(transfers, PENDING, operation)
    assert [posting.poll() for _ in range(3)] == [PENDING] * 3
    assert posting.error == "it broke"
    connection.closed = True
    assert (posting.poll(), posting.error) == (end, "it broke")


def test_a_write_that_was_under_way_when_its_path_closed_proves_nothing_of_the_peer_s_memory() -> None:
    connection, posting = scripted([ScriptedTransfer(PENDING), ScriptedTransfer(PENDING)], FAILED, Operation.WRITE)
    assert posting.poll() is PENDING
    connection.closed = True
    assert (posting.poll(), posting.error) == (UNPROVED, "the data path was closed")
