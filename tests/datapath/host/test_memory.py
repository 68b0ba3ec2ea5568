"""Rank memories: how they are allocated, who may write them, and what is refused."""

import array
import ctypes
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.datapath.host.host_memory import Available, available
from kvgrpc.datapath.host.memory import NONCE_BYTES, PrivateMemory, SharedMemory, is_host
from kvgrpc.errors import Exhausted, InvalidRequest, PreconditionFailed, Reason


def at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE - 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 5])
def test_a_pool_is_zeros_at_the_address_it_names(nbytes: int) -> None:
    memory = SharedMemory.create(nbytes)
    (segment,) = memory.segments
    assert (segment.nbytes, segment.kind, memory.nbytes) == (nbytes, MemoryKind.HOST, nbytes)
    assert memory.as_numpy().tolist() == [0] * nbytes
    memory.as_numpy()[-1] = 7
    assert at(segment.address + nbytes - 1, 1) == b"\7"
    memory.close()


def test_the_nonce_lies_behind_the_pool_and_is_never_the_same() -> None:
    one, other = SharedMemory.create(5000), SharedMemory.create(5000)
    assert at(one.nonce_address, NONCE_BYTES) == one.nonce
    assert one.nonce != other.nonce
    assert one.nonce_offset >= 5000
    one.close()
    other.close()


def test_a_pool_has_all_its_memory_and_can_neither_shrink_nor_grow() -> None:
    memory = SharedMemory.create(1 << 20)
    status = os.fstat(memory.fd)
    assert status.st_blocks * 512 >= status.st_size > 1 << 20
    for size in (0, 2 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.close()


def test_a_pool_larger_than_what_is_left_is_refused_with_both_numbers() -> None:
    limit = available()
    assert limit is not None
    too_much = limit.nbytes * 2
    with pytest.raises(Exhausted) as caught:
        SharedMemory.create(too_much)
    assert caught.value.reason is Reason.POOL_EXHAUSTED
    assert f"a pool of {too_much} bytes" in caught.value.message
    assert "bytes are left" in caught.value.message


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_pool_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(InvalidRequest):
        SharedMemory.create(nbytes)


def test_a_reopened_descriptor_can_only_read() -> None:
    memory = SharedMemory.create(8192)
    fd = memory.reopen_read_only()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 8192)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    memory.as_numpy()[:3] = (1, 2, 3)
    with mmap.mmap(fd, 8192, prot=mmap.PROT_READ) as mapping:
        assert mapping[:3] == b"\1\2\3"
    os.close(fd)
    memory.close()


def test_descriptors_are_not_inherited() -> None:
    memory = SharedMemory.create(8192)
    fd = memory.reopen_read_only()
    assert not os.get_inheritable(fd)
    assert not os.get_inheritable(memory.fd)
    os.close(fd)
    memory.close()


def test_the_engine_attaches_and_writes_what_the_owner_sees() -> None:
    owner = SharedMemory.create(5000)
    engine = SharedMemory.attach(owner.fd)
    engine.as_numpy()[4999] = 9
    assert owner.as_numpy()[4999] == 9
    assert (engine.nbytes, engine.nonce, engine.nonce_offset) == (5000, owner.nonce, owner.nonce_offset)
    owner.close()
    assert engine.as_numpy()[4999] == 9
    engine.close()


def test_once_forbidden_no_descriptor_gives_a_writer_and_old_writers_go_on() -> None:
    owner = SharedMemory.create(5000)
    engine = SharedMemory.attach(owner.fd)
    owner.forbid_new_writers()
    owner.forbid_new_writers()
    with pytest.raises(PreconditionFailed):
        SharedMemory.attach(owner.fd)
    with pytest.raises(PermissionError):
        os.write(owner.fd, b"x")
    again = os.open(f"/proc/self/fd/{owner.fd}", os.O_RDONLY)
    os.fchmod(again, 0o600)
    writable = os.open(f"/proc/self/fd/{again}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(writable, 4096)
    engine.as_numpy()[0] = 5
    assert owner.as_numpy()[0] == 5
    for fd in (again, writable):
        os.close(fd)
    engine.close()
    owner.close()


def test_only_a_pool_can_be_attached(tmp_path: Path) -> None:
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 8192)
    with pytest.raises(PreconditionFailed, match="not sealed"):
        SharedMemory.attach(plain)
    fcntl.fcntl(plain, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(PreconditionFailed, match="not allocated"):
        SharedMemory.attach(plain)
    os.posix_fallocate(plain, 0, 8192)
    with pytest.raises(PreconditionFailed, match="8192 bytes for a pool of 0"):
        SharedMemory.attach(plain)
    os.close(plain)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(PreconditionFailed):
        SharedMemory.attach(file.fileno())


def test_views_stay_valid_after_close() -> None:
    memory = SharedMemory.create(8192)
    view = memory.as_numpy()[:4]
    view[:] = 3
    memory.close()
    memory.close()
    assert view.tolist() == [3, 3, 3, 3]


def test_private_memory_lists_its_allocations_in_order() -> None:
    first, second = np.zeros(10, dtype=np.float32), bytearray(7)
    third = array.array("q", [1, 2])
    memory = PrivateMemory.of(first, second, third)
    assert [segment.nbytes for segment in memory.segments] == [40, 7, 16]
    assert memory.nbytes == 63
    first[0] = 1.5
    assert at(memory.segments[0].address, 40) == first.tobytes()
    assert at(memory.nonce_address, NONCE_BYTES) == memory.nonce


def test_private_memory_keeps_its_allocations_alive() -> None:
    memory = PrivateMemory.of(np.full(1 << 20, 6, dtype=np.uint8))
    assert at(memory.segments[0].address, 1 << 20) == b"\6" * (1 << 20)


def test_closed_private_memory_shows_another_nonce() -> None:
    memory = PrivateMemory.of(bytearray(8))
    address, nonce = memory.nonce_address, memory.nonce
    memory.close()
    assert at(address, NONCE_BYTES) != nonce
    memory.close()


def test_tensors_are_taken_in_any_dense_order() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    memory = PrivateMemory.of(tensor, tensor.permute(2, 0, 1))
    assert [s.nbytes for s in memory.segments] == [48, 48]
    assert memory.segments[0].address == memory.segments[1].address == tensor.data_ptr()
    assert is_host(memory.segments)
    with pytest.raises(InvalidRequest, match="gaps"):
        PrivateMemory.of(tensor[:, :2])
    with pytest.raises(InvalidRequest, match="meta"):
        PrivateMemory.of(torch.empty(4, device="meta"))


def test_device_memory_is_no_host_memory() -> None:
    memory = PrivateMemory([Segment(1 << 20, 64), Segment(1 << 30, 64, MemoryKind.CUDA, 1)])
    assert not is_host(memory.segments)


def test_buffers_with_gaps_or_without_bytes_or_write_access_are_refused() -> None:
    frozen = np.zeros(8)
    frozen.flags.writeable = False
    for bad in (np.zeros((4, 4))[:, :2], frozen, b"constant", bytearray()):
        with pytest.raises(InvalidRequest):
            PrivateMemory.of(bad)
    with pytest.raises(InvalidRequest):
        PrivateMemory.of()


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:     800 kB\n"}


def test_without_a_cgroup_the_host_limits(tmp_path: Path) -> None:
    root = tree(tmp_path, MEMINFO)
    assert available(root) == Available(800 << 10, "MemAvailable of the host")


def test_the_tightest_cgroup_above_limits_and_idle_file_cache_counts_as_free(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/pod/engine\n",
            "sys/fs/cgroup/pod/engine/memory.max": "max\n",
            "sys/fs/cgroup/pod/engine/memory.current": "100\n",
            "sys/fs/cgroup/pod/memory.max": "5000\n",
            "sys/fs/cgroup/pod/memory.current": "4000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 300\n",
        },
    )
    assert available(root) == Available(1300, "memory.max of cgroup /pod")


def test_a_version_1_cgroup_limits_too_also_seen_from_within_a_container(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:cpu,memory:/host/path/not/here\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000\n",
        },
    )
    assert available(root) == Available(0, "memory.limit_in_bytes of cgroup /")


def test_a_version_1_cgroup_without_a_limit_sets_none(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000\n",
        },
    )
    assert available(root) is None
