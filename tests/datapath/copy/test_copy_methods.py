"""Ways to copy within a process: all give the same bytes, and the fastest is optional."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.datapath.copy import copy_methods
from kvgrpc.datapath.copy.copy_methods import CopyMethod
from kvgrpc.datapath.copy.rows import load, row_function
from kvgrpc.datapath.host import libc
from scripts import build_rows

ROOT = Path(__file__).resolve().parents[3]
METHODS = tuple(method for method in CopyMethod if copy_methods.copier(method) is not None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offset", [0, 16, 1, 33])
def test_rows_of_every_length_arrive_and_nothing_else_changes(method: CopyMethod, offset: int) -> None:
    """Lengths lie around every limit: 16 bytes, a cache line, the start of streaming, a page."""
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
    copy = copy_methods.copier(method)
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
    copy = copy_methods.copier(method)
    assert copy is not None
    copy(np.ascontiguousarray(rows))
    copy(rows[:0])
    assert np.array_equal(destination, source)


def test_there_is_always_a_way_to_copy() -> None:
    assert METHODS[-1] is CopyMethod.LOOP
    assert all(copy_methods.best(row_bytes) in METHODS for row_bytes in (1, 4096, 1 << 30))


def test_this_installation_has_the_compiled_loops_where_there_is_a_compiler() -> None:
    assert (load() is not None) is (shutil.which("cc") is not None)


def test_without_the_compiled_library_there_is_no_function_of_it(tmp_path: Path) -> None:
    assert row_function("kvgrpc_copy_rows", path=tmp_path / "absent.so") is None


def test_a_compiler_that_fails_or_is_absent_leaves_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / build_rows.SOURCE.parent
    folder.mkdir(parents=True)
    (tmp_path / build_rows.SOURCE).write_text("this is not C")
    for compiler in ("cc", "/absent/cc"):
        monkeypatch.setenv("CC", compiler)
        (tmp_path / build_rows.LIBRARY).write_bytes(b"an old one")
        assert build_rows.compile_rows(tmp_path)
        assert not (tmp_path / build_rows.LIBRARY).exists()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    command = ["cc", *options, "-o", str(tmp_path / "rows.so"), str(ROOT / build_rows.SOURCE)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
