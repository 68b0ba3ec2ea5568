"""Calls into the driver's library follow its header, shown on a library made from that header.

The tests in tests/gpu show how a GPU handles them.
"""

import ctypes
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import DataPathUnavailable, PostingState
from kvgrpc.datapath.cuda_vmm import libcuda
from kvgrpc.datapath.cuda_vmm.driver import DriverError
from kvgrpc.datapath.cuda_vmm.libcuda import CudaDriver
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath, CudaVmmRemote
from kvgrpc.datapath.mirror.device import CopyFailed
from tests.datapath.cuda_vmm.fake_driver import view
from tests.datapath.peers import GUARD, content, move, reach, runs_of

HERE = Path(__file__).parent
HEADERS = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include/cuda.h"))
COMPILER = shutil.which("cc")
WHY = "" if COMPILER else "there is no compiler"
WHY = WHY or ("" if HEADERS else "there is no cuda.h: torch for CUDA brings it")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "there is all that it needs")
UNIT = 1 << 16
NBYTES = 2 * UNIT + 77


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
    command = [str(COMPILER), "-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-I{HEADERS[0].parent}"]
    subprocess.run([*command, "-o", str(made), str(HERE / "libcuda_double.c")], check=True)
    return str(made)


class Double:
    """The state of the library that a test sets."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def fail(self, call: str, number: int = 1) -> None:
        """Makes the `number`th of these calls from now on fail."""
        (ctypes.c_char * 64).in_dll(self._library, "failing").value = call.encode()
        ctypes.c_int.in_dll(self._library, "fails_at").value = number

    def set_of_host(self, of_host: bool) -> None:
        ctypes.c_int.in_dll(self._library, "of_host").value = of_host

    def set_range_more(self, nbytes: int) -> None:
        ctypes.c_size_t.in_dll(self._library, "range_more").value = nbytes


@pytest.fixture
def double(library: str) -> Iterator[Double]:
    made = Double(library)
    yield made
    made.fail("", 0)
    made.set_of_host(False)
    made.set_range_more(0)


@pytest.fixture
def driver(library: str) -> Iterator[CudaDriver]:
    made = CudaDriver(library)
    yield made
    double = ctypes.CDLL(library)
    assert (double.handles_left(), double.mappings_left(), double.contexts_left()) == (0, 0, 0)
    assert ctypes.c_int.in_dll(double, "events_left").value == 0


def rows(*values: tuple[int, int, int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_devices_have_names_and_reach_each_other_as_the_driver_says(driver: CudaDriver) -> None:
    assert driver.uuids() == (b"\x01" * 16, b"\x02" * 16)
    assert (driver.reaches(0, 1), driver.reaches(1, 0)) == (True, False)
    assert driver.granularity(1) == UNIT


def test_an_allocation_goes_by_a_descriptor_and_is_read_through_its_second_mapping(driver: CudaDriver) -> None:
    memory = VmmMemory(driver, 1, NBYTES)
    (segment,) = memory.segments
    assert (segment.nbytes, segment.device) == (NBYTES, 1)
    view(segment.address, NBYTES)[:] = content(1, NBYTES)
    found = driver.find(1, segment.address + UNIT + 5)
    assert found is not None
    assert (found.address, found.nbytes, found.exports) == (segment.address, 3 * UNIT, True)
    fd = driver.export(found.handle)
    handle = driver.import_(0, fd)
    os.close(fd)
    address = driver.map(0, handle, 3 * UNIT, writable=False)
    driver.release(handle)
    driver.release(found.handle)
    memory.free()
    read = np.zeros(100, dtype=np.uint8)
    driver.copy(0, rows((read.ctypes.data, address + 40, 60), (read.ctypes.data + 60, address, 40))).synchronize()
    assert np.array_equal(read, np.concatenate([content(1, NBYTES)[40:100], content(1, NBYTES)[:40]]))
    driver.unmap(0, address, 3 * UNIT)


def test_memory_that_was_not_mapped_from_a_handle_is_not_found(driver: CudaDriver) -> None:
    assert driver.find(0, np.zeros(10, dtype=np.uint8).ctypes.data) is None


def test_a_call_that_fails_has_its_name_and_the_results(driver: CudaDriver) -> None:
    with pytest.raises(DriverError) as failed:
        driver.create(0, UNIT + 1)
    assert (failed.value.call, failed.value.result) == ("cuMemCreate", "CUDA_ERROR_INVALID_VALUE")
    assert failed.value.message == "cuMemCreate: CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(DriverError, match="cuMemImportFromShareableHandle"), Path("/dev/null").open("rb") as null:
        driver.import_(0, null.fileno())


def test_a_mapping_that_fails_leaves_no_addresses_taken(driver: CudaDriver) -> None:
    handle = driver.create(0, UNIT)
    with pytest.raises(DriverError, match="cuMemMap"):
        driver.map(0, handle, 2 * UNIT, writable=True)
    driver.release(handle)


def test_memory_of_the_host_or_of_another_device_is_not_a_devices(driver: CudaDriver, double: Double) -> None:
    memory = VmmMemory(driver, 1, NBYTES)
    found = driver.find(0, memory.segments[0].address)
    assert found is not None
    fd = driver.export(found.handle)
    handle = driver.import_(0, fd)
    os.close(fd)
    assert [driver.is_of(handle, device) for device in (0, 1)] == [False, True]
    double.set_of_host(True)
    assert not driver.is_of(handle, 1)
    double.set_of_host(False)
    for one in (handle, found.handle):
        driver.release(one)
    memory.free()


def test_a_range_whose_end_is_no_part_of_the_allocation_is_said_to_be_none(driver: CudaDriver, double: Double) -> None:
    memory = VmmMemory(driver, 0, NBYTES)
    for more, whole in ((0, True), (1 << 40, False)):
        double.set_range_more(more)
        found = driver.find(0, memory.segments[0].address)
        assert found is not None
        assert (found.exports, found.whole) == (True, whole)
        driver.release(found.handle)
    memory.free()


@pytest.mark.parametrize(
    ("call", "number"), [("cuMemGetAllocationPropertiesFromHandle", 1), ("cuMemRelease", 1), ("cuMemRelease", 2)]
)
def test_a_search_that_fails_keeps_no_handle_but_the_one_not_taken_back(
    driver: CudaDriver, double: Double, library: str, call: str, number: int
) -> None:
    memory = VmmMemory(driver, 0, NBYTES)
    handle = driver.find(0, memory.segments[0].address)
    assert handle is not None
    double.fail(call, number)
    with pytest.raises(DriverError, match=f"{call}: CUresult 12345"):
        driver.find(0, memory.segments[0].address)
    driver.release(handle.handle)
    memory.free()
    if call == "cuMemRelease":
        driver.release(handle.handle)  # else the double would not be empty: exactly one reference is left
    assert ctypes.CDLL(library).handles_left() == 0


@pytest.mark.parametrize(("call", "number"), [("cuStreamCreate", 1), ("cuEventCreate", 1), ("cuMemcpyAsync", 1)])
def test_a_copy_of_which_no_row_was_queued_has_failed_and_nothing_follows(
    driver: CudaDriver, double: Double, call: str, number: int
) -> None:
    double.fail(call, number)
    array = np.zeros(20, dtype=np.uint8)
    row = (array.ctypes.data, array.ctypes.data + 10, 10)
    with pytest.raises(CopyFailed, match=f"{call}: CUresult 12345"):
        driver.copy(0, rows(row, row))
    driver.copy(0, rows(row)).synchronize()


@pytest.mark.parametrize(("call", "number"), [("cuMemcpyAsync", 2), ("cuEventRecord", 1)])
def test_a_copy_of_which_some_rows_were_queued_proves_nothing(
    driver: CudaDriver, double: Double, call: str, number: int
) -> None:
    double.fail(call, number)
    array = np.zeros(20, dtype=np.uint8)
    row = (array.ctypes.data, array.ctypes.data + 10, 10)
    with pytest.raises(DriverError, match=f"{call}: CUresult 12345"):
        driver.copy(0, rows(row, row))


def test_a_wait_that_fails_keeps_no_event(driver: CudaDriver, double: Double) -> None:
    double.fail("cuEventSynchronize")
    array = np.zeros(20, dtype=np.uint8)
    copies = driver.copy(0, rows((array.ctypes.data, array.ctypes.data + 10, 10)))
    with pytest.raises(DriverError, match="cuEventSynchronize: CUresult 12345"):
        copies.synchronize()


def test_a_rank_reads_the_memory_of_another_one_with_it(driver: CudaDriver) -> None:
    source, own = VmmMemory(driver, 1, NBYTES), VmmMemory(driver, 0, NBYTES)
    written, array = content(2, NBYTES), view(own.segments[0].address, NBYTES)
    view(source.segments[0].address, NBYTES)[:] = written
    array[:] = GUARD
    paths = [CudaVmmPath(memory) for memory in (source, own)]
    remote = reach(paths[1], paths[0].offer(RankEndpoint(0)))
    assert isinstance(remote, CudaVmmRemote)
    assert move(paths[1], remote, runs_of((5, 9, UNIT + 3))).poll() is PostingState.DONE
    assert np.array_equal(array[9 : UNIT + 12], written[5 : UNIT + 8])
    assert (array[:9] == GUARD).all()
    assert (array[UNIT + 12 :] == GUARD).all()
    with pytest.raises(DataPathUnavailable, match="no peer access"):
        reach(paths[0], paths[1].offer(RankEndpoint(0)))
    assert remote.process is not None
    remote.process.close()
    for path in reversed(paths):
        path.close()
    for memory in (source, own):
        memory.free()


def test_a_library_without_these_calls_is_none() -> None:
    for library in ("libc.so.6", "libnowhere.so"):
        with pytest.raises(DataPathUnavailable, match="cannot be used"):
            CudaDriver(library)


def test_the_structures_are_as_long_as_the_headers(tmp_path: Path) -> None:
    asks = tmp_path / "sizes.c"
    asks.write_text(
        "#include <cuda.h>\nint sizes[] = {sizeof(CUmemAllocationProp), sizeof(CUmemAccessDesc), sizeof(CUdeviceptr),"
        " sizeof(CUmemGenericAllocationHandle), sizeof(CUuuid)};\n"
    )
    made = tmp_path / "sizes.so"
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", f"-I{HEADERS[0].parent}", "-o", str(made), str(asks)], check=True
    )
    sizes = list((ctypes.c_int * 5).in_dll(ctypes.CDLL(str(made)), "sizes"))
    ours = [ctypes.sizeof(libcuda.Properties), ctypes.sizeof(libcuda.AccessOf), 8, 8, libcuda.UUID_BYTES]
    assert sizes == ours
