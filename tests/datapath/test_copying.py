"""The ways to copy within a process: all give the same bytes; the machine code is its listing."""

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.datapath.copy import copying
from kvgrpc.datapath.copy.copying import CopyMethod
from kvgrpc.datapath.copy.crc32c import SUM_ROWS
from kvgrpc.datapath.copy.machine_code import parse
from kvgrpc.datapath.copy.stream_copy import COPY_ROWS
from kvgrpc.datapath.host import libc

METHODS = copying.available_methods()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offset", [0, 16, 1, 33])
def test_rows_of_every_length_arrive_and_nothing_else_changes(method: CopyMethod, offset: int) -> None:
    """Lengths around every limit: 16 bytes, a cache line, where streaming begins, a page."""
    lengths = [1, 15, 16, 63, 64, 65, 960, 1023, 1024, 1025, 1088, 4095, 4096, 4160, 100_000]
    source = np.random.default_rng(5).integers(0, 256, 400_000, dtype=np.uint8)
    destination = np.full(400_000, 0xA5, dtype=np.uint8)
    base = -destination.ctypes.data % 64 + offset
    starts = base + np.cumsum([0] + [-(-n // 64) * 64 + 128 for n in lengths[:-1]])
    after = destination.copy()
    for i, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        after[start : start + n] = source[i * 7 : i * 7 + n]
    rows = np.array(
        [
            (destination.ctypes.data + start, source.ctypes.data + i * 7, n)
            for i, (start, n) in enumerate(zip(starts, lengths, strict=True))
        ],
        dtype=np.int64,
    )
    copy = copying.copier(method)
    assert copy is not None
    copy(rows)
    assert np.array_equal(destination, after)


@pytest.mark.parametrize("method", METHODS)
def test_more_rows_than_one_call_of_the_kernel_takes(method: CopyMethod) -> None:
    count = 3 * libc.IOV_MAX + 5
    source = np.random.default_rng(6).integers(0, 256, count * 32, dtype=np.uint8)
    destination = np.zeros_like(source)
    order = np.random.default_rng(7).permutation(count) * 32
    rows = np.stack([destination.ctypes.data + order, source.ctypes.data + order, np.full(count, 32)], axis=1).astype(
        np.int64
    )
    copy = copying.copier(method)
    assert copy is not None
    copy(np.ascontiguousarray(rows))
    copy(rows[:0])
    assert np.array_equal(destination, source)


def test_there_is_always_a_way_to_copy() -> None:
    assert METHODS[-1] is CopyMethod.LOOP
    assert all(copying.best(row_bytes) in METHODS for row_bytes in (1, 4096, 1 << 30))


@pytest.mark.skipif(
    shutil.which("as") is None or platform.machine() != "x86_64",
    reason="there is no assembler for x86-64",
)
@pytest.mark.parametrize("source", [COPY_ROWS, SUM_ROWS], ids=["copy", "sum"])
def test_the_machine_code_is_what_its_listing_says(tmp_path: Path, source: str) -> None:
    code, listing = parse(source)
    text, binary = tmp_path / "copy.s", tmp_path / "copy.bin"
    text.write_text(f".intel_syntax noprefix\n{listing}\n")
    subprocess.run(["as", "--64", text, "-o", tmp_path / "copy.o"], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", tmp_path / "copy.o", binary], check=True)
    assert binary.read_bytes() == code
