"""A mover with its reports, peers in this process, and a data path that a test controls."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from kvgrpc.core.actions import Operation, Post
from kvgrpc.core.events import PeerMapped, PostingEnded
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.datapath.base import Buffer, DataPath, Posting, PostingState, Remote
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.host.process_socket import ProcessSocket, SocketReply
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.questions import Answer, Question
from kvgrpc.datapath.reports import Report
from kvgrpc.datapath.settings import MoverSettings
from tests.datapath.loopback import LoopbackPath
from tests.datapath.peers import DEADLINE_S, GUARD, Bytes, runs_of

NBYTES = 1 << 20
BEST_FIRST = ("shm", "window", "cma", "nixl", "cuda_vmm", "collective", "loopback")
DONE, FAILED, PENDING = PostingState.DONE, PostingState.FAILED, PostingState.PENDING
Kind = TypeVar("Kind", bound=Report)


AT_SOURCE = RankEndpoint(0, loopback=LoopbackEndpoint("source", NBYTES))
WHOLE = runs_of((0, 0, NBYTES))


def post_of(name: str, peer: str, runs: Runs, operation: Operation = Operation.READ, **options: Any) -> Post:
    return Post(1, name, peer, runs, "t", operation, **options)


class Rank:
    """A mover with its memory, and a queue of its reports."""

    def __init__(self, paths: Callable[[PrivateMemory], list[DataPath]], *, number: int = 1, **options: Any) -> None:
        self.bytes: Bytes = np.full(NBYTES, GUARD, dtype=np.uint8)
        memory = PrivateMemory.of(self.bytes)
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.mover = Mover(number, memory, paths(memory), self.reports.put, MoverSettings(**options))
        self.mover.start()

    def post(
        self, name: str, peer: str, runs: Runs, operation: Operation = Operation.READ, **options: Any
    ) -> PostingEnded | None:
        arrival, at_once = options.pop("arrival", None), options.pop("at_once", False)
        return self.mover.post(post_of(name, peer, runs, operation, **options), arrival, at_once=at_once)

    def next(self, kind: type[Kind]) -> Kind:
        report = self.reports.get(timeout=DEADLINE_S)
        assert isinstance(report, kind), report
        return report

    def connect(self, peer: str, endpoint: RankEndpoint) -> PeerMapped:
        self.mover.connect(peer, endpoint, BEST_FIRST)
        return self.mapped()

    def mapped(self) -> PeerMapped:
        """Returns the next report, which says that a peer is connected."""
        report = self.next(PeerMapped)
        assert report.data_path, report
        return report

    def not_mapped(self) -> PeerMapped:
        """Returns the next report, which says that no data path reaches a peer."""
        report = self.next(PeerMapped)
        assert not report.data_path, report
        return report


class Held:
    """A data path that needs polling, and whose behaviour a test decides."""

    name = "held"
    needs_polling = True

    def __init__(self, waits: bool = False, hangs: bool = False) -> None:
        self.asks = waits
        self.connect_hangs = hangs
        self.socket = ProcessSocket()
        self.withdrawn: list[str] = []
        self.release = threading.Event()
        self.state = PENDING
        self.peers_need_turns = True
        self.turns = 0
        self.looks = 0
        self.wakes: list[Callable[[], None]] = []
        self.buffers: list[Buffer] = []
        self.break_at = ""
        self.asked = self.connected = self.closed = self.remote_closed = False

    def step(self, name: str) -> None:
        if self.break_at == name:
            raise RuntimeError(f"{name} is broken")

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        self.step("offer")
        return endpoint

    def withdraw(self, peer: str) -> None:
        self.withdrawn.append(peer)

    def question(self, endpoint: RankEndpoint) -> Question | None:
        """Returns a question to a process that answers when it is released."""
        return Question(*self.socket.mint("", "held", self._answer)) if self.asks else None

    def _answer(self, *_: object) -> SocketReply:
        self.asked = True
        self.release.wait(DEADLINE_S)
        return SocketReply()

    def connect(self, endpoint: RankEndpoint, answer: Answer | str = "") -> Remote:
        self.step("connect")
        self.connected = True
        if self.connect_hangs:
            self.release.wait(DEADLINE_S)
        return HeldRemote(self)

    def progress(self) -> None:
        self.turns += 1
        self.step("progress")

    def close(self) -> None:
        self.step("close")
        self.release.set()
        self.socket.close()
        self.closed = True


class HeldWritten(Held):
    """A data path by which this rank writes, and by which peers may write."""

    late_writes = ""
    ends_with_process = True

    def __init__(self) -> None:
        super().__init__()
        self.rekeyed = 0
        self.processes: list[HeldPeerProcess] = []
        """Processes of its peers, in the order of connecting."""

    def connect(self, endpoint: RankEndpoint, answer: Answer | str = "") -> Remote:
        self.processes.append(HeldPeerProcess())
        return HeldWritableRemote(self, self.processes[-1])

    def rekey(self) -> None:
        self.step("rekey")
        self.rekeyed += 1


class HeldRemote:
    why = "held by the test"
    process: "HeldPeerProcess | None" = None

    def __init__(self, path: Held) -> None:
        self.path = path

    def read(self, runs: Runs, wake: Callable[[], None]) -> Posting:
        self.path.step("read")
        self.path.wakes.append(wake)
        return HeldPosting(self.path)

    def read_into(self, buffer: Buffer, runs: Runs, wake: Callable[[], None]) -> Posting:
        self.path.buffers.append(buffer)
        return self.read(runs, wake)

    def close(self) -> None:
        self.path.step("remote close")
        self.path.remote_closed = True


class HeldPeerProcess:
    """A peer's process that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = False
        self.closed = False

    def close(self) -> None:
        self.closed = True


class HeldWritableRemote(HeldRemote):
    def __init__(self, path: Held, process: "HeldPeerProcess") -> None:
        super().__init__(path)
        self.process = process

    def write(self, runs: Runs, wake: Callable[[], None]) -> Posting:
        return self.read(runs, wake)


class HeldPosting:
    error = "failed as told"

    def __init__(self, path: Held) -> None:
        self.path = path

    def poll(self) -> PostingState:
        self.path.looks += 1
        self.path.step("poll")
        return self.path.state


def with_held(held: Held) -> Rank:
    return Rank(lambda memory: [held, LoopbackPath(memory, "own")])


def held_rank(held: Held) -> Rank:
    rank = with_held(held)
    rank.mover.connect("h", RankEndpoint(0), ["held"])
    rank.mapped()
    return rank


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread; fails when the condition does not become true."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.001)
