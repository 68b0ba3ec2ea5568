"""A mirror of a device that a test controls."""

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvgrpc.core.events import CopiedOut
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.datapath.base import DataPathFailed, Posting, PostingState
from kvgrpc.datapath.mirror import lane
from kvgrpc.datapath.mirror.device import CopyFailed
from kvgrpc.datapath.mirror.lane import CopyLost
from kvgrpc.datapath.mirror.mirror import Mirror, make_memory
from kvgrpc.datapath.mirror.ranges import Ranges
from tests.datapath.mirror.devices import NBYTES, WAIT_S, Device


class Bench:
    def __init__(self) -> None:
        self.device = Device()
        self.memory = make_memory(self.device)
        self.reports: queue.SimpleQueue[CopiedOut] = queue.SimpleQueue()
        self.mirror = Mirror(3, self.memory, self.device, self.reports.put)

    def copy_out(self, name: str, *rows: tuple[int, int]) -> None:
        offsets, nbytes = np.array(rows, dtype=np.int64).T
        self.mirror.copy_out(name, Pieces(offsets, nbytes, np.empty(0, dtype=np.int64)))

    def copy_in(self, *rows: tuple[int, int]) -> tuple[Posting, threading.Event]:
        ended = threading.Event()
        return self.mirror.copy_in(ranges(*rows), ended.set), ended

    def report(self) -> CopiedOut:
        return self.reports.get(timeout=WAIT_S)


def ranges(*rows: tuple[int, int]) -> Ranges:
    offsets, nbytes = np.array(rows, dtype=np.int64).T
    return Ranges.of(offsets, nbytes, NBYTES)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.mirror.close(0.0)


def test_a_copy_out_is_reported_when_its_last_piece_is_there(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "PIECE_BYTES", 1024)
    bench.copy_out("a", (4096, 1024), (0, 2048))
    first, second = bench.device.next(), bench.device.next()
    assert [(call.offsets, call.nbytes) for call in (first, second)] == [([0], [1024]), ([1024], [1024])]
    assert bench.device.calls.empty(), "two pieces at once"
    second.end()
    first.end()
    third = bench.device.next()
    assert (third.offsets, bench.reports.empty()) == ([4096], True)
    third.end()
    assert bench.report() == CopiedOut(3, "a")


def test_copies_of_one_direction_follow_each_other_and_not_the_other_direction(bench: Bench) -> None:
    bench.copy_out("a", (0, 8))
    bench.copy_out("b", (0, 8))
    posting, ended = bench.copy_in((512, 8))
    calls = {call.way: call for call in (bench.device.next(), bench.device.next())}
    assert bench.device.calls.empty()
    calls["in"].end()
    assert ended.wait(WAIT_S)
    assert posting.poll() is PostingState.DONE
    calls["out"].end()
    assert bench.report() == CopiedOut(3, "a")
    bench.device.next().end()
    assert bench.report() == CopiedOut(3, "b")


def test_bytes_are_clear_once_no_copy_out_of_them_is_to_come(bench: Bench) -> None:
    bench.copy_out("a", (0, 8))
    call, asked = bench.device.next(), threading.Event()
    assert bench.mirror.is_clear(ranges((8, 8)), asked.set)
    assert not bench.mirror.is_clear(ranges((7, 8)), asked.set)
    call.end()
    assert asked.wait(WAIT_S)
    assert bench.mirror.is_clear(ranges((7, 8)), asked.set)


def test_who_asks_in_every_turn_is_called_once(bench: Bench) -> None:
    bench.copy_out("a", (0, 8))
    call, calls, last = bench.device.next(), [], threading.Event()

    def wake() -> None:
        calls.append("woken")

    for _ in range(100):
        assert not bench.mirror.is_clear(ranges((0, 8)), wake)
    call.end()
    bench.report()
    bench.copy_out("b", (0, 8))
    assert not bench.mirror.is_clear(ranges((0, 8)), last.set)
    bench.device.next().end()
    assert last.wait(WAIT_S)
    assert calls == ["woken"]


def test_what_the_device_refuses_fails_and_the_next_one_is_copied(bench: Bench) -> None:
    bench.device.refuses = CopyFailed("out of order")
    bench.copy_out("a", (0, 8))
    assert bench.report() == CopiedOut(3, "a", "out of order")
    bench.device.refuses = None
    posting, ended = bench.copy_in((0, 8))
    bench.device.next().end(CopyFailed("broken"))
    assert ended.wait(WAIT_S)
    assert (posting.poll(), posting.error) == (PostingState.FAILED, "broken")
    bench.copy_out("b", (0, 8))
    bench.device.next().end()
    assert bench.report() == CopiedOut(3, "b")


def test_after_the_first_failure_no_piece_is_begun(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "PIECE_BYTES", 1024)
    bench.copy_out("a", (0, 8192))
    first, second = bench.device.next(), bench.device.next()
    first.end(CopyFailed("broken"))
    assert bench.reports.empty(), "the other piece is under way"
    second.end()
    assert bench.report() == CopiedOut(3, "a", "broken")
    assert bench.device.calls.empty()


def test_a_lost_copy_is_no_end_and_nothing_follows_it(bench: Bench) -> None:
    posting, ended = bench.copy_in((0, 8))
    bench.device.next().end(RuntimeError("who knows"))
    assert ended.wait(WAIT_S)
    with pytest.raises(CopyLost, match="who knows"):
        posting.poll()
    again, ended = bench.copy_in((512, 8))
    assert ended.wait(WAIT_S)
    assert (again.poll(), "who knows" in again.error) == (PostingState.FAILED, True)
    assert not bench.mirror.close(WAIT_S)
    assert not bench.device.closed


def test_bytes_over_which_a_copy_was_lost_are_never_clear(bench: Bench) -> None:
    bench.copy_out("a", (0, 8))
    bench.device.next().end(RuntimeError("who knows"))
    assert bench.report().message == "who knows"
    with pytest.raises(DataPathFailed, match="who knows"):
        bench.mirror.is_clear(ranges((0, 1)), lambda: None)
    assert bench.mirror.is_clear(ranges((8, 1)), lambda: None)


def test_close_ends_all_copies_after_the_piece_that_they_are_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "PIECE_BYTES", 1024)
    bench.copy_out("a", (0, 8192))
    bench.copy_out("b", (0, 8))
    calls = [bench.device.next(), bench.device.next()]
    assert not bench.mirror.close(0.0), "they are under way"
    assert not bench.device.closed
    for call in calls:
        call.end()
    assert bench.mirror.close(WAIT_S)
    assert bench.device.closed == ["closed"]
    assert [bench.report().message for _ in range(2)] == ["this rank is closing"] * 2
    bench.copy_out("c", (0, 8))
    assert bench.report() == CopiedOut(3, "c", "this rank is closing")


def test_a_mirror_that_the_device_does_not_let_go_of_is_not_at_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no such mirror")

    monkeypatch.setattr(bench.device, "close", broken)
    assert not bench.mirror.close(WAIT_S)
    assert "no such mirror" in caplog.text


def test_a_command_that_leaves_the_memory_fails_by_itself(bench: Bench) -> None:
    bench.copy_out("a", (NBYTES - 4, 8))
    assert "of the source's memory" in bench.report().message
    assert bench.device.calls.empty()


def test_a_report_that_cannot_be_taken_and_a_name_that_comes_twice_stop_nothing(bench: Bench) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def report(event: CopiedOut) -> None:
        told.put(event.name)
        raise RuntimeError("not now")

    bench.mirror._report = report
    for name in ("a", "a", "b"):
        bench.copy_out(name, (0, 8))
    for name in ("a", "a", "b"):
        assert not bench.mirror.is_clear(ranges((0, 8)), lambda: None)
        bench.device.next().end()
        assert told.get(timeout=WAIT_S) == name
    assert bench.mirror.is_clear(ranges((0, 8)), lambda: None)
