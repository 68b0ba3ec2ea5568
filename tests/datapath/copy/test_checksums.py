"""CRC-32C of blocks of a rank's memory: correct for any pieces, and every request gets a report."""

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Iterator

import google_crc32c
import numpy as np
import pytest

from kvgrpc.core.events import ChecksumsComputed
from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.copy import crc32c
from kvgrpc.datapath.copy.checksums import ChecksumThreads
from kvgrpc.datapath.copy.rows import row_function
from kvgrpc.datapath.host.memory import PrivateMemory
from tests.datapath.peers import DEADLINE_S, GUARD, content

Reports = queue.SimpleQueue[ChecksumsComputed]

FIRST, SECOND = content(1, 9 << 20), content(2, 1 << 20)
WHOLE = np.concatenate([FIRST, SECOND]).tobytes()
BORDER = len(FIRST)


def pieces(*sums: tuple[tuple[int, int], ...]) -> Pieces:
    """Makes pieces of one checksum for each argument, over its (offset, bytes) one after the other."""
    flat = [piece for one in sums for piece in one]
    columns = ([offset for offset, _ in flat], [nbytes for _, nbytes in flat], [len(one) for one in sums])
    return Pieces(*(np.array(column, dtype=np.int64) for column in columns))


def expected(*sums: tuple[tuple[int, int], ...]) -> list[int]:
    return [google_crc32c.value(b"".join(WHOLE[at : at + nbytes] for at, nbytes in one)) for one in sums]


CASES: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    "nothing": (),
    "one byte": (((5, 1),),),
    "several pieces": (((5, 10), (100, 3)), ((7, 1000),)),
    "over the end of a segment": (((BORDER - 10, 30),), ((BORDER, 5),), ((BORDER - 3, 3), (BORDER - 1, 2))),
    "the whole memory": (((0, len(WHOLE)),),),
    "more than one slice": tuple(((i << 20, 1 << 20),) for i in reversed(range(10))),
    "several pieces of each, last ones first": tuple(((i << 19, 70_000), (i * 7, 33)) for i in reversed(range(12))),
    "an empty piece": (((3, 0), (4, 5)),),
}


@pytest.fixture
def reports() -> Reports:
    return queue.SimpleQueue()


@pytest.fixture
def sums(reports: Reports) -> Iterator[ChecksumThreads]:
    made = ChecksumThreads(0, PrivateMemory.of(FIRST, SECOND), 2, reports.put)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES)
def test_each_checksum_is_of_its_pieces_in_order(sums: ChecksumThreads, reports: Reports, case: str) -> None:
    sums.start(case, pieces(*CASES[case]))
    found = reports.get(timeout=DEADLINE_S)
    assert (found.name, found.message) == (case, "")
    assert np.frombuffer(found.values, dtype="<u4").tolist() == expected(*CASES[case])


def test_a_loop_in_python_makes_the_same_sums() -> None:
    """The loop is used where the package was installed without a C compiler."""
    assert crc32c.computes_crc32c(crc32c.checksum_in_loop)
    assert crc32c.computes_crc32c(crc32c.checksummer())


SUMMERS: dict[str, Callable[[], crc32c.ChecksumRows]] = {
    "compiled": crc32c.checksummer,
    "loop": lambda: crc32c.checksum_in_loop,
}


@pytest.mark.parametrize("by", SUMMERS)
def test_copies_to_any_place_arrive_with_checksums_and_touch_nothing_else(by: str, subtests: pytest.Subtests) -> None:
    whole = bytes([GUARD])
    for skipped, nbytes in itertools.product([0, 1, 16, 48], [0, 1, 64, 1023, 1024, 1025, 4096, 10_240, 10_007]):
        room = np.full(nbytes + 256, GUARD, dtype=np.uint8)
        begin = -room.ctypes.data % 64 + skipped
        values = np.zeros(2, dtype=np.uint32)
        row = (room.ctypes.data + begin, FIRST.ctypes.data + 33, nbytes, values.ctypes.data)
        SUMMERS[by]()(np.array([row, (FIRST.ctypes.data, 0, 9, values.ctypes.data + 4)], dtype=np.int64))
        copied = FIRST[33 : 33 + nbytes].tobytes()
        with subtests.test(skipped=skipped, nbytes=nbytes):
            assert values.tolist() == [google_crc32c.value(copied), google_crc32c.value(FIRST[:9].tobytes())]
            assert room.tobytes() == whole * begin + copied + whole * (len(room) - begin - nbytes)


@pytest.mark.parametrize("by", SUMMERS)
def test_a_checksum_is_of_what_was_written_though_the_source_changes(by: str) -> None:
    source, room, values = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8), np.zeros(1, np.uint32)
    rows = np.array([(room.ctypes.data, source.ctypes.data, len(source), values.ctypes.data)], dtype=np.int64)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            source[:] += 1

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(50):
            values[0] = 0
            SUMMERS[by]()(rows)
            assert values[0] == google_crc32c.value(room.tobytes())
    finally:
        stop.set()
        changing.join()


def test_a_checksum_is_written_once_its_row_is_whole() -> None:
    """Checksums of two threads share a cache line, and each write takes the line away from the other thread."""
    values, seen = np.zeros(1, np.uint32), list[int]()

    def extend(so_far: int, at: int, nbytes: int) -> int:
        seen.append(int(values[0]))
        return so_far + nbytes

    function = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)(extend)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    checksum_rows = row_function("kvgrpc_checksum_rows", address)
    if checksum_rows is None:
        pytest.skip("there was no C compiler")
    rows = [(FIRST.ctypes.data, 0, nbytes, values.ctypes.data) for nbytes in (3000, 100)]
    checksum_rows(np.array(rows, dtype=np.int64))
    assert (seen, values[0]) == ([0, 0, 0, 3000], 3100)


def test_a_function_with_wrong_checksums_is_not_used() -> None:
    assert not crc32c.computes_crc32c(lambda _: None)


@pytest.mark.parametrize("bad", [(-1, 1), (len(WHOLE), 1), (0, len(WHOLE) + 1), (0, -1)])
def test_pieces_out_of_range_are_refused(sums: ChecksumThreads, reports: Reports, bad: tuple[int, int]) -> None:
    sums.start("bad", pieces((bad,)))
    found = reports.get(timeout=DEADLINE_S)
    assert found.message
    assert not found.values


def test_memory_of_a_device_has_no_checksums() -> None:
    with pytest.raises(DataPathUnavailable, match="device"):
        crc32c.Checksummer([Segment(1 << 20, 64, MemoryKind.CUDA)])


def test_after_the_end_nothing_is_reported_and_nothing_breaks(sums: ChecksumThreads, reports: Reports) -> None:
    sums.close()
    sums.start("late", pieces(((0, 1),)))
    assert reports.empty()
