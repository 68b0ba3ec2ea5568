"""Peers for the tests of the data paths: ranks in this process, and real processes that own memory.

A peer's memory holds bytes that follow from its seed, so that a test knows what it must read.
"""

import contextlib
import importlib.util
import multiprocessing
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.actions import Operation
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.sends import SendAsk
from kvgrpc.datapath.asker import Asker
from kvgrpc.datapath.base import DataPath, Memory, Posting, PostingState, Remote, WritableRemote
from kvgrpc.datapath.collective.path import CollectivePath
from kvgrpc.datapath.copy.copy_methods import CopyMethod
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory
from kvgrpc.datapath.paths.cma import CmaPath
from kvgrpc.datapath.paths.shm import ShmPath
from kvgrpc.datapath.paths.window import WindowPath
from kvgrpc.datapath.questions import Answer, Question
from tests.datapath.cuda_vmm.fake_driver import DRIVER, exported, plain
from tests.datapath.loopback import LoopbackPath
from tests.datapath.pumped import HOST, LONG_S, LOST, PumpedPath, Said

Bytes = NDArray[np.uint8]
GUARD = 0xA5
DEADLINE_S = 20.0
HAS_NIXL = importlib.util.find_spec("kvgrpc.datapath.nixl.path") is not None


def content(seed: int, nbytes: int) -> Bytes:
    """Returns the bytes that the peer of that seed holds."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def private(sizes: tuple[int, ...]) -> tuple[PrivateMemory, list[Bytes]]:
    """Makes memory of several allocations, and views of them."""
    arrays = [np.zeros(size, dtype=np.uint8) for size in sizes]
    return PrivateMemory.of(*arrays), arrays


def shared(sizes: tuple[int, ...]) -> tuple[SharedMemory, list[Bytes]]:
    memory = SharedMemory.create(sum(sizes))
    return memory, [memory.as_numpy()]


MakePath = Callable[[Any, str], DataPath]


def make_shm(memory: Memory, _: str) -> DataPath:
    return ShmPath(memory)


def make_shm_kernel(memory: Memory, _: str) -> DataPath:
    return ShmPath(memory, copy_method=CopyMethod.KERNEL)


def make_shm_loop(memory: Memory, _: str) -> DataPath:
    return ShmPath(memory, copy_method=CopyMethod.LOOP)


def make_cma(memory: PrivateMemory | SharedMemory, _: str) -> DataPath:
    return CmaPath(memory)


def make_loopback(memory: Memory, key: str) -> DataPath:
    return LoopbackPath(memory, key)


def make_cuda_vmm(memory: Memory, _: str) -> DataPath:
    return CudaVmmPath(memory, DRIVER)


def make_nixl(memory: Memory, key: str) -> DataPath:
    from kvgrpc.datapath.nixl.path import NixlPath

    return NixlPath(memory, key)


def make_collective(memory: Any, _: str) -> DataPath:
    return PumpedPath(memory)


def make_window(memory: Any, _: str) -> DataPath:
    return PumpedPath(memory, WindowPath)


def make_sent(memory: Any, _: str) -> DataPath:
    return CollectivePath(memory, HOST)


@dataclass(frozen=True)
class Case:
    """One way to move bytes: a data path, and the kind of memory on each side."""

    name: str
    make: MakePath
    peer_memory: Callable[[tuple[int, ...]], tuple[Any, list[Bytes]]]
    own_memory: Callable[[tuple[int, ...]], tuple[Any, list[Bytes]]]
    in_process: bool = False
    method: CopyMethod | None = None
    writes: bool = False
    """True if the source may move the bytes."""


CASES = [
    Case("loopback", make_loopback, private, private, in_process=True, writes=True),
    Case("shm", make_shm, shared, private),
    Case("shm-pools", make_shm, shared, shared),
    Case("shm-kernel", make_shm_kernel, shared, private, method=CopyMethod.KERNEL),
    Case("shm-loop", make_shm_loop, shared, private, method=CopyMethod.LOOP),
    Case("cma", make_cma, private, private),
    Case("cma-pools", make_cma, shared, shared),
    Case("cuda_vmm", make_cuda_vmm, exported, plain),
    Case("cuda_vmm-pools", make_cuda_vmm, exported, exported),
    Case("collective", make_collective, private, private),
    Case("collective-pools", make_collective, shared, shared),
    Case("window", make_window, private, private),
    Case("window-pools", make_window, shared, shared),
    *([Case("nixl", make_nixl, private, private, writes=True)] if HAS_NIXL else []),
]


SENT = Case("collective", make_sent, private, private, in_process=True)
"""Case for movers with leads between them, as in `tests.datapath.many_ranks`; bytes still go over TCP."""
BY_MOVERS = [case for case in CASES if case.make not in (make_collective, make_window)]
"""Cases of data paths that a mover uses without leads."""
IN_HOSTS = [case for case in BY_MOVERS if case.make is not make_cuda_vmm]
"""Cases whose memory the processor can read."""


def ask(question: Question, rank: int | None = None) -> Answer | str:
    """Asks a question as the mover of that rank does, and returns the answer."""
    answers: queue.SimpleQueue[Answer | str] = queue.SimpleQueue()
    asker = Asker("test")
    asker.ask(question, answers.put, rank)
    answer = answers.get(timeout=DEADLINE_S)
    asker.close()
    return answer


def answered(question: Question) -> bool:
    answer = ask(question)
    if isinstance(answer, Answer):
        answer.close()
    return isinstance(answer, Answer)


def reach(path: DataPath, endpoint: RankEndpoint, peer: "Peer | None" = None) -> Any:
    """Asks and connects as the mover does; raises as `DataPath.connect` does."""
    if isinstance(path, PumpedPath):
        return path.connect(endpoint, peer and peer.send)
    question = path.question(endpoint)
    answer = "" if question is None else ask(question)
    try:
        return path.connect(endpoint, answer)
    finally:
        if isinstance(answer, Answer):
            answer.close()


class Peer:
    """A rank with known bytes; `endpoint()` says how to reach it."""

    def __init__(self, case: Case, seed: int, sizes: tuple[int, ...]) -> None:
        self.content = content(seed, sum(sizes))

    def endpoint(self) -> RankEndpoint:
        raise NotImplementedError

    def bytes(self) -> Bytes:
        """Returns all of its memory, as it is now."""
        raise NotImplementedError

    def send(self, peer: str, ask: SendAsk) -> Said:
        """Has it send, on data paths where the source takes part."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class LocalPeer(Peer):
    """A peer in this process."""

    def __init__(self, case: Case, seed: int, sizes: tuple[int, ...]) -> None:
        super().__init__(case, seed, sizes)
        self._memory, self._parts = case.peer_memory(sizes)
        fill(self._parts, self.content)
        self._path = case.make(self._memory, f"peer-{seed}")

    def endpoint(self) -> RankEndpoint:
        return self._path.offer(RankEndpoint(0))

    def bytes(self) -> Bytes:
        return gather(self._parts)

    def close(self) -> None:
        self._path.close()
        self._memory.close()


class ProcessPeer(Peer):
    """A peer in a process of its own, as another engine would be."""

    def __init__(self, case: Case, seed: int, sizes: tuple[int, ...]) -> None:
        super().__init__(case, seed, sizes)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, case.make, case.peer_memory, seed, sizes), daemon=True
        )
        self.process.start()
        theirs.close()

    def endpoint(self) -> RankEndpoint:
        answer = self._ask("offer")
        assert isinstance(answer, RankEndpoint), answer
        return answer

    def bytes(self) -> Bytes:
        answer: Bytes = self._ask("bytes")
        return answer

    def send(self, peer: str, ask: SendAsk) -> Said:
        try:
            answer: Said = self._ask((peer, ask), LONG_S)
        except (OSError, EOFError) as error:
            return (), f"the peer is gone: {error}", LOST
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)

    def _ask(self, what: Any, wait_s: float = DEADLINE_S) -> Any:
        self._pipe.send(what)
        assert self._pipe.poll(wait_s)
        return self._pipe.recv()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send("exit")
        self.process.join(DEADLINE_S)
        self._pipe.close()
        self.process.close()


def serve(
    pipe: Connection,
    make: MakePath,
    make_memory: Callable[[tuple[int, ...]], tuple[Any, list[Bytes]]],
    seed: int,
    sizes: tuple[int, ...],
) -> None:
    """Runs a peer's process: it owns memory, and offers and shows it whenever it is asked."""
    memory, parts = make_memory(sizes)
    fill(parts, content(seed, sum(sizes)))
    path = make(memory, f"peer-{seed}")
    while True:
        while not pipe.poll(0.0002 if path.needs_polling else None):
            path.progress()
        try:
            wanted = pipe.recv()
        except EOFError:
            break
        if wanted == "exit":
            break
        if isinstance(wanted, tuple):
            assert isinstance(path, PumpedPath)
            pipe.send(path.send(*wanted))
        else:
            pipe.send(path.offer(RankEndpoint(0)) if wanted == "offer" else gather(parts))
    path.close()
    memory.close()


def fill(parts: list[Bytes], data: Bytes) -> None:
    first = 0
    for part in parts:
        part[:] = data[first : first + len(part)]
        first += len(part)


def gather(parts: list[Bytes]) -> Bytes:
    return np.concatenate(parts)


@dataclass
class Own:
    """This test's rank: memory full of guard bytes, and a data path into it."""

    path: DataPath
    memory: Any
    parts: list[Bytes]
    remotes: list[Remote] = field(default_factory=list)

    def connect(self, peer: Peer) -> Remote:
        remote: Remote = reach(self.path, peer.endpoint(), peer)
        self.remotes.append(remote)
        return remote

    def reset(self) -> None:
        for part in self.parts:
            part[:] = GUARD

    def bytes(self) -> Bytes:
        return gather(self.parts)


@contextlib.contextmanager
def own_rank(case: Case, sizes: tuple[int, ...]) -> Iterator[Own]:
    memory, parts = case.own_memory(sizes)
    own = Own(case.make(memory, "own"), memory, parts)
    own.reset()
    try:
        yield own
    finally:
        for remote in own.remotes:
            remote.close()
        own.path.close()
        memory.close()


class Wake:
    """An event that wakes the waiter of a posting."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> None:
        self.event.set()


def finish(path: DataPath, posting: Posting, wake: Wake) -> PostingState:
    """Waits for the end of a posting as the mover does; fails the test when it does not come."""
    waited = 0.0
    while posting.poll() is PostingState.PENDING and waited < DEADLINE_S:
        if path.needs_polling:
            path.progress()
        step = 0.0002 if path.needs_polling else DEADLINE_S
        wake.event.wait(step)
        waited += step
    state = posting.poll()
    assert state is not PostingState.PENDING, "the posting does not end"
    return state


def start(remote: Remote, operation: Operation, runs: Runs, wake: Wake) -> Posting:
    if operation is Operation.READ:
        return remote.read(runs, wake)
    assert isinstance(remote, WritableRemote)
    return remote.write(runs, wake)


def move(path: DataPath, remote: Remote, runs: Runs, operation: Operation = Operation.READ) -> Posting:
    wake = Wake()
    posting = start(remote, operation, runs, wake)
    finish(path, posting, wake)
    return posting


def runs_of(*rows: tuple[int, int, int]) -> Runs:
    """Makes runs from rows of (source, destination, bytes)."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Runs(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


def open_descriptors() -> int:
    """Returns the number of descriptors that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def blocks(seed: int, block: int, count: int, source: int, destination: int) -> Runs:
    """Makes runs of `count` scattered blocks of `block` bytes, between memories of `source` and `destination` bytes."""
    rng = np.random.default_rng(seed)
    src = rng.permutation(source // block)[:count].astype(np.int64) * block
    dst = rng.permutation(destination // block)[:count].astype(np.int64) * block
    return Runs(src, dst, np.full(len(src), block, dtype=np.int64))


def expected(before: Bytes, source: Bytes, runs: Runs) -> Bytes:
    """Returns the destination's bytes after the runs have moved: theirs from the source, all others unchanged."""
    after = before.copy()
    for src, dst, nbytes in zip(runs.src, runs.dst, runs.nbytes, strict=True):
        after[dst : dst + nbytes] = source[src : src + nbytes]
    return after
