"""Memory of a GPU by descriptors, between processes: a real driver behaves as the fake driver claims.

Several processes use the first GPU, with about 2 GB of its memory. One of them ends with an illegal access, which under
MPS would end all other processes on that GPU too.
"""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np
import pytest
import torch

from bench.measures.devices import cuda_pool, missing
from bench.plan import PULL_QUICK
from bench.stages.gpus import GpuEngines
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import DataPathUnavailable, PostingState
from kvgrpc.datapath.cuda_vmm import libcuda
from kvgrpc.datapath.cuda_vmm.driver import DriverError
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath, CudaVmmRemote
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.engine.cuda_memory import CudaMemory
from tests.datapath.peers import Bytes, content, move, reach, runs_of

WHY = missing("cuda")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "there is one")
MPS = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
GPU = "cuda:0"
NBYTES = (256 << 20) + 12_345
WHOLE = runs_of((0, 0, NBYTES))
SEED = 3
WAIT_S = 60.0
READ_OTHERS, WROTE_NOTHING = 6, 7
AT_ONCE = 16


@pytest.fixture(scope="module", autouse=True)
def _exports() -> None:
    try:
        VmmMemory(libcuda.load(), 0, 1).free()
    except (DriverError, DataPathUnavailable) as error:
        pytest.skip(f"the driver makes no memory of which peers get descriptors: {error.message}")


def memory_of(seed: int) -> CudaMemory:
    made = CudaMemory(GPU, NBYTES, exported=True)
    assert isinstance(made.memory, VmmMemory), "the log says what the driver refuses"
    made.tensor.copy_(torch.from_numpy(content(seed, NBYTES)))
    torch.cuda.synchronize(GPU)
    return made


def serve(pipe: Connection) -> None:
    """Runs a process that has memory, and offers, shows and frees it on request."""
    made = memory_of(SEED)
    path = CudaVmmPath(made.memory)
    while True:
        wanted = pipe.recv()
        if wanted == "offer":
            pipe.send(path.offer(RankEndpoint(0)))
        elif wanted == "bytes":
            pipe.send_bytes(made.read([(0, NBYTES)])[0])
        else:
            path.close()
            made.close()
            pipe.send("freed")


class Source:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: str) -> Any:
        self._pipe.send(what)
        assert self._pipe.poll(WAIT_S), "the source says nothing"
        return self._pipe.recv_bytes() if what == "bytes" else self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)

    def close(self) -> None:
        self.kill()
        self.process.close()
        self._pipe.close()


@pytest.fixture
def source() -> Iterator[Source]:
    with closing(Source()) as made:
        yield made


class Reader:
    """A rank with memory of cudaMalloc."""

    def __init__(self, device: str = GPU) -> None:
        self.tensor = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        self.path = CudaVmmPath(PrivateMemory.of(self.tensor))

    def reach(self, endpoint: RankEndpoint) -> CudaVmmRemote:
        remote = reach(self.path, endpoint)
        assert isinstance(remote, CudaVmmRemote)
        if remote.process is not None:
            remote.process.close()  # nobody waits for its end here
        return remote

    def holds(self) -> Bytes:
        array: Bytes = self.tensor.cpu().numpy()
        return array

    def close(self) -> None:
        """Closes the path, which also unmaps its mappings."""
        self.path.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    with closing(Reader()) as made:
        yield made


SCATTERED = runs_of(*((i * 65_536 + 7, (4_000 - i) * 65_536 + 1, 65_000) for i in range(4_000)))


def test_runs_of_another_processes_memory_arrive_and_no_other_byte_changes(source: Source, reader: Reader) -> None:
    remote = reader.reach(source.ask("offer"))
    assert move(reader.path, remote, SCATTERED).poll() is PostingState.DONE
    expected, there = np.zeros(NBYTES, dtype=np.uint8), content(SEED, NBYTES)
    for at, to, nbytes in zip(SCATTERED.src, SCATTERED.dst, SCATTERED.nbytes, strict=True):
        expected[to : to + nbytes] = there[at : at + nbytes]
    assert np.array_equal(reader.holds(), expected)


def write_into(endpoint: RankEndpoint) -> None:
    """Exits with WROTE_NOTHING if the GPU can read the memory and refuses to write it."""
    remote = Reader().reach(endpoint)

    class Mapped:
        __cuda_array_interface__ = {  # noqa: RUF012 - torch reads it
            "shape": (64,), "typestr": "|u1", "data": (remote._mappings.segments[0].address, False), "version": 3,
        }  # fmt: skip

    mapped = torch.as_tensor(Mapped(), device=GPU)
    if not np.array_equal(mapped.cpu().numpy(), content(SEED, NBYTES)[:64]):
        os._exit(READ_OTHERS)
    try:
        mapped.fill_(0)
        torch.cuda.synchronize(GPU)
    except RuntimeError:
        os._exit(WROTE_NOTHING)


@pytest.mark.skipif(MPS, reason="with MPS an illegal access ends all processes on that GPU")
def test_a_kernel_that_writes_into_a_peers_memory_fails_and_ends_no_other_process(source: Source) -> None:
    writer = multiprocessing.get_context("spawn").Process(target=write_into, args=(source.ask("offer"),), daemon=True)
    writer.start()
    try:
        writer.join(WAIT_S)
        assert writer.exitcode == WROTE_NOTHING
    finally:
        writer.kill()
        writer.join(WAIT_S)
        writer.close()
    assert source.ask("bytes") == content(SEED, NBYTES).tobytes()


@pytest.mark.parametrize("end", [Source.kill, lambda source: source.ask("free")], ids=["killed", "freed"])
def test_memory_is_there_when_its_source_is_gone(source: Source, reader: Reader, end: Callable[[Source], Any]) -> None:
    remote = reader.reach(source.ask("offer"))
    end(source)
    assert move(reader.path, remote, WHOLE).poll() is PostingState.DONE
    assert np.array_equal(reader.holds(), content(SEED, NBYTES))


def test_copies_under_way_go_on_while_their_source_is_killed(source: Source, reader: Reader) -> None:
    remote = reader.reach(source.ask("offer"))
    ended = threading.Event()
    postings = [remote.read(WHOLE, ended.set) for _ in range(AT_ONCE)]
    source.process.kill()
    deadline = time.monotonic() + WAIT_S
    while source.process.is_alive():  # keep a copy under way until it is gone, however fast the GPU is
        assert time.monotonic() < deadline, "it does not end"
        ended.wait(0.001)
        ended.clear()
        while postings[-AT_ONCE].poll() is not PostingState.PENDING:
            postings.append(remote.read(WHOLE, ended.set))
    assert move(reader.path, remote, WHOLE).poll() is PostingState.DONE
    assert {posting.poll() for posting in postings} == {PostingState.DONE}
    assert np.array_equal(reader.holds(), content(SEED, NBYTES))


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize(GPU)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(0)[0])


def test_memory_is_the_gpus_again_when_source_and_reader_have_let_go() -> None:
    memory_of(SEED).close()
    with ExitStack() as ends:
        reader = ends.enter_context(closing(Reader()))
        before = free_bytes()
        made = ends.enter_context(closing(memory_of(SEED)))
        path = ends.enter_context(closing(CudaVmmPath(made.memory)))
        remote = reader.reach(path.offer(RankEndpoint(0)))
        path.close()
        made.close()
        assert free_bytes() < before - NBYTES // 2
        remote.close()
        assert free_bytes() > before - NBYTES // 2


def test_memory_that_nobody_closed_is_the_gpus_again_with_its_last_tensor() -> None:
    memory_of(SEED).close()
    before = free_bytes()
    part = memory_of(SEED).tensor[8:16]
    assert free_bytes() < before - NBYTES // 2
    assert part.cpu().numpy().tobytes() == content(SEED, NBYTES)[8:16].tobytes()
    del part
    assert free_bytes() > before - NBYTES // 2


def test_memory_of_cuda_malloc_is_offered_with_the_reason_why_it_is_not(reader: Reader) -> None:
    part = reader.path.offer(RankEndpoint(0)).cuda_vmm
    assert part is not None
    assert part.why_not == "memory of cudaMalloc cannot be exported as descriptors; nixl may reach it"


def test_engines_on_one_gpu_pull_each_others_blocks() -> None:
    case = PULL_QUICK.cases("cuda_vmm", 16 << 10)[0]
    with GpuEngines(case, cuda_pool) as engines:
        engines.check()
        assert engines.copy_s() > 0


@pytest.mark.skipif(not WHY and torch.cuda.device_count() < 2, reason="it needs two CUDA devices")
def test_a_gpu_reads_the_memory_of_another_one_or_says_that_it_cannot(source: Source) -> None:
    with closing(Reader("cuda:1")) as reader:
        if torch.cuda.can_device_access_peer(1, 0):
            remote = reader.reach(source.ask("offer"))
            assert move(reader.path, remote, WHOLE).poll() is PostingState.DONE
            assert np.array_equal(reader.holds(), content(SEED, NBYTES))
        else:
            with pytest.raises(DataPathUnavailable, match="no peer access"):
                reader.reach(source.ask("offer"))
