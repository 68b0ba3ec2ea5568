"""Engines with many ranks, each with memory, a data path and a mover of its own, in this process or in another one.

    with engines(case, environment) as (source, destination):
        endpoints = source.ask("begin", memories)
        destination.ask("begin", ...)
        destination.ask("move", endpoints, posts)
        destination.ask("end")      # returns the bytes of its memories

Ranks are made when they are first needed, and stay, as do their connections. In this process, leads between the ranks
carry asks to send.
"""

import contextlib
import multiprocessing
import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar
from unittest import mock

from kvgrpc.core.actions import Operation, Post
from kvgrpc.core.events import EndpointOffered, PeerMapped, PostingEnded
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.reports import Report
from kvgrpc.datapath.settings import MoverSettings
from tests.datapath.leads import Leads
from tests.datapath.movers import BEST_FIRST
from tests.datapath.peers import DEADLINE_S, GUARD, Bytes, Case
from tests.datapath.pumped import LONG_S

NBYTES = 512 << 10
"""Size of a rank's memory, in bytes."""
STAGING_BYTES = 64 << 10
"""Size of a staging arena, in bytes: small, so that postings wait for one another."""
PEER = "other"
Kind = TypeVar("Kind", bound=Report)


class OneRank:
    """A rank, with a queue of its reports."""

    def __init__(self, case: Case, engine: str, number: int, leads: Leads) -> None:
        self.memory, (self.bytes,) = (case.peer_memory if engine == "source" else case.own_memory)((NBYTES,))
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        path = case.make(self.memory, f"{engine}-{number}")
        settings = MoverSettings(staging_bytes=STAGING_BYTES)
        self.mover = Mover(number, self.memory, [path], leads.reports_of((engine, number), self.reports), settings)
        leads.add((engine, number), self.mover)
        self.mover.start()
        self.mover.offer(engine, PEER)
        self.endpoint = self.next(EndpointOffered).endpoint
        self.connected: set[int] = set()

    def next(self, kind: type[Kind], wait_s: float = DEADLINE_S) -> Kind:
        report = self.reports.get(timeout=wait_s)
        assert isinstance(report, kind), report
        return report

    def connect(self, endpoint: RankEndpoint) -> None:
        """Connects to a rank of the other engine, unless it is connected."""
        if endpoint.rank not in self.connected:
            self.connected.add(endpoint.rank)
            self.mover.connect(PEER, endpoint, BEST_FIRST)
            mapped = self.next(PeerMapped, LONG_S)
            assert mapped.data_path, mapped

    def close(self) -> None:
        assert self.mover.close(DEADLINE_S)
        self.memory.close()


class Ranks:
    """The ranks of an engine in this process."""

    def __init__(self, case: Case, name: str, leads: Leads) -> None:
        self._case, self._name, self._leads = case, name, leads
        self._ranks: list[OneRank] = []
        self._used: list[OneRank] = []

    def ask(self, method: str, *arguments: object) -> Any:
        """Calls one of the methods below."""
        return getattr(self, method)(*arguments)

    def begin(self, memories: Sequence[Bytes]) -> list[RankEndpoint]:
        """Fills each rank's memory with these bytes and guard bytes behind them, and returns the ranks' endpoints."""
        while len(self._ranks) < len(memories):
            self._ranks.append(OneRank(self._case, self._name, len(self._ranks), self._leads))
        self._used = self._ranks[: len(memories)]
        for rank, data in zip(self._used, memories, strict=True):
            rank.bytes[:] = GUARD
            rank.bytes[: len(data)] = data
            rank.mover.expect("access", Operation.WRITE if self._name == "destination" else Operation.READ)
        return [rank.endpoint for rank in self._used]

    def move(self, endpoints: Sequence[RankEndpoint], posts: Sequence[Post]) -> int:
        """Runs all postings at once, and returns the number of bytes that arrived."""
        for post in posts:
            self._ranks[post.rank].connect(endpoints[post.peer_rank])
        for post in posts:
            self._ranks[post.rank].mover.post(post)
        ends = [self._ranks[post.rank].next(PostingEnded) for post in posts]
        assert all(end.done for end in ends), ends
        return sum(end.nbytes for end in ends)

    def end(self) -> list[Bytes]:
        """Ends the access, and returns the bytes of the ranks in use."""
        for rank in self._used:
            rank.mover.unexpect("access")
        return [rank.bytes.copy() for rank in self._used]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class RanksProcess:
    """The ranks of an engine in a process of its own."""

    def __init__(self, case: Case, name: str, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, case, name), daemon=True)
        with mock.patch.dict(os.environ, environment):
            self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: object) -> Any:
        """Calls a method there; raises AssertionError with the error that it raised."""
        self._pipe.send((method, *arguments))
        assert self._pipe.poll(2 * DEADLINE_S), f"{method} does not return"
        error, answer = self._pipe.recv()
        assert not error, error
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(("close",))
        self._process.join(2 * DEADLINE_S)
        exit_code = self._process.exitcode
        self._pipe.close()
        self._process.close()
        assert exit_code == 0


def serve(pipe: Connection, case: Case, name: str) -> None:
    """Serves an engine's ranks over a pipe, until it reads "close"."""
    ranks = Ranks(case, name, Leads(PEER))
    while True:
        method, *arguments = pipe.recv()
        if method == "close":
            break
        try:
            answer = "", ranks.ask(method, *arguments)
        except Exception as error:  # noqa: BLE001 - raised at the other side
            answer = repr(error), None
        pipe.send(answer)
    ranks.close()


class Asked(Protocol):
    """An engine, in this process or in another one."""

    def ask(self, method: str, *arguments: object) -> Any: ...
    def close(self) -> None: ...


@contextlib.contextmanager
def engines(case: Case, environment: Mapping[str, str]) -> Iterator[tuple[Asked, Asked]]:
    """Makes a source and a destination, each in a process of its own unless the data path works within one process."""
    with contextlib.ExitStack() as stack:
        both: list[Asked] = []
        leads = Leads(PEER)
        for name in ("source", "destination"):
            both.append(Ranks(case, name, leads) if case.in_process else RanksProcess(case, name, environment))
            stack.callback(both[-1].close)
        yield both[0], both[1]
