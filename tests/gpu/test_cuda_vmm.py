"""Memory of a GPU by descriptors, between processes: what the fake driver only claims is so is shown here."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np
import pytest
import torch

from kvgrpc.bench.measures.devices import cuda_pool, missing
from kvgrpc.bench.plan import PULL_QUICK
from kvgrpc.bench.stages.gpus import GpuEngines
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath, CudaVmmRemote
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.engine.cuda_memory import CudaMemory
from tests.datapath.peers import Bytes, content, move, reach, runs_of

WHY = missing("cuda")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "there is one")
GPU = "cuda:0"
NBYTES = (256 << 20) + 12_345
SEED = 3
WAIT_S = 60.0
WROTE_NOTHING = 7


def memory_of(seed: int) -> CudaMemory:
    made = CudaMemory(GPU, NBYTES, exported=True)
    assert isinstance(made.memory, VmmMemory), "the log says what the driver refuses"
    made.tensor.copy_(torch.from_numpy(content(seed, NBYTES)))
    torch.cuda.synchronize(GPU)
    return made


def serve(pipe: Connection) -> None:
    """A process that has memory: offers it, shows it, and frees it, as it is told."""
    made = memory_of(SEED)
    path = CudaVmmPath(made.memory)
    while (wanted := pipe.recv()) != "exit":
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
        assert self._pipe.poll(WAIT_S)
        return self._pipe.recv_bytes() if what == "bytes" else self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.kill()


class Reader:
    """A rank with memory of cudaMalloc."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(NBYTES, dtype=torch.uint8, device=GPU)
        torch.cuda.synchronize(GPU)
        self.path = CudaVmmPath(PrivateMemory.of(self.tensor))

    def reach(self, endpoint: RankEndpoint) -> CudaVmmRemote:
        remote = reach(self.path, endpoint)
        assert isinstance(remote, CudaVmmRemote)
        return remote

    def close(self) -> None:
        self.path.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def holds(reader: Reader) -> Bytes:
    array: Bytes = reader.tensor.cpu().numpy()
    return array


SCATTERED = runs_of(*((i * 65_536 + 7, (4_000 - i) * 65_536 + 1, 65_000) for i in range(4_000)))


def test_runs_of_another_processes_memory_arrive_and_no_other_byte_changes(source: Source, reader: Reader) -> None:
    remote = reader.reach(source.ask("offer"))
    assert move(reader.path, remote, SCATTERED).poll() is PostingState.DONE
    expected, there = np.zeros(NBYTES, dtype=np.uint8), content(SEED, NBYTES)
    for at, to, nbytes in zip(SCATTERED.src, SCATTERED.dst, SCATTERED.nbytes, strict=True):
        expected[to : to + nbytes] = there[at : at + nbytes]
    assert np.array_equal(holds(reader), expected)


def write_into(endpoint: RankEndpoint) -> None:
    """Exits with WROTE_NOTHING where the GPU refuses."""
    remote = Reader().reach(endpoint)

    class Mapped:
        __cuda_array_interface__ = {  # noqa: RUF012 - torch reads it
            "shape": (64,), "typestr": "|u1", "data": (remote._mappings.segments[0].address, False), "version": 3,
        }  # fmt: skip

    try:
        torch.as_tensor(Mapped(), device=GPU).fill_(0)
        torch.cuda.synchronize(GPU)
    except RuntimeError:
        os._exit(WROTE_NOTHING)


def test_a_kernel_that_writes_into_a_peers_memory_fails_and_ends_no_other_process(source: Source) -> None:
    writer = multiprocessing.get_context("spawn").Process(target=write_into, args=(source.ask("offer"),), daemon=True)
    writer.start()
    writer.join(WAIT_S)
    assert writer.exitcode == WROTE_NOTHING
    assert source.ask("bytes") == content(SEED, NBYTES).tobytes()


@pytest.mark.parametrize("end", [Source.kill, lambda source: source.ask("free")], ids=["killed", "freed"])
def test_memory_is_there_when_its_source_is_gone(source: Source, reader: Reader, end: Callable[[Source], Any]) -> None:
    remote = reader.reach(source.ask("offer"))
    end(source)
    whole = runs_of((0, 0, NBYTES))
    assert move(reader.path, remote, whole).poll() is PostingState.DONE
    assert np.array_equal(holds(reader), content(SEED, NBYTES))


def test_copies_under_way_go_on_when_their_source_is_killed(source: Source, reader: Reader) -> None:
    remote = reader.reach(source.ask("offer"))
    postings = [remote.read(runs_of((0, 0, NBYTES)), lambda: None) for _ in range(200)]  # some 50 GB
    source.kill()
    assert postings[-1].poll() is PostingState.PENDING, "it was too late"
    assert move(reader.path, remote, runs_of((0, 0, NBYTES))).poll() is PostingState.DONE
    assert {posting.poll() for posting in postings} == {PostingState.DONE}
    assert np.array_equal(holds(reader), content(SEED, NBYTES))


def free_bytes() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(0)[0])


def test_memory_is_the_gpus_again_when_source_and_reader_have_let_go() -> None:
    memory_of(SEED).close()
    with closing(Reader()) as reader:
        before = free_bytes()
        made = memory_of(SEED)
        path = CudaVmmPath(made.memory)
        remote = reader.reach(path.offer(RankEndpoint(0)))
        path.close()
        made.close()
        assert free_bytes() <= before - NBYTES
        remote.close()
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
    tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize("cuda:1")
    path = CudaVmmPath(PrivateMemory.of(tensor))
    if torch.cuda.can_device_access_peer(1, 0):
        remote = reach(path, source.ask("offer"))
        assert move(path, remote, runs_of((0, 0, NBYTES))).poll() is PostingState.DONE
        assert np.array_equal(tensor.cpu().numpy(), content(SEED, NBYTES))
    else:
        with pytest.raises(Exception, match="no peer access"):
            reach(path, source.ask("offer"))
    path.close()
