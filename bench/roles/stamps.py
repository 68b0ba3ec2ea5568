"""Records when the last byte of each read landed, at the data path itself: before mover, event loop and RPC learn of
it.

It wraps every data path of the servers that this process starts while it is on. A path that calls `wake` is stamped at
its last call; a polled path when it first answers DONE. Wrapped paths only read.
"""

import importlib
import time
from collections.abc import Callable
from typing import Any

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import DataPath, PeerProcess, Posting, PostingState, PromptRemote, Remote
from kvgrpc.datapath.questions import Answer, Question


class Stamps:
    """Times on the system's monotonic clock, which all processes of a machine share, in nanoseconds."""

    def __init__(self) -> None:
        self.on = False
        self._reads: list[_Read] = []

    def install(self) -> None:
        """Watches the servers that are started while `on` is set."""
        ranks: Any = importlib.import_module("kvgrpc.local_ranks")
        make_paths = ranks.make_paths

        def make_stamped(*arguments: Any) -> Any:
            paths, status = make_paths(*arguments)
            return ([_Path(path, self._reads.append) for path in paths] if self.on else paths), status

        ranks.make_paths = make_stamped

    def take(self) -> list[int]:
        """Returns the end of every read since the last call, oldest first."""
        ends = [read.ended_ns for read in self._reads]
        self._reads.clear()
        return ends


class _Read:
    """Implements `Posting`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.ended_ns = 0
        self.posting: Posting | None = None
        self._wake = wake

    def wake(self) -> None:
        self.ended_ns = time.monotonic_ns()
        self._wake()

    def poll(self) -> PostingState:
        assert self.posting is not None
        state = self.posting.poll()
        if state is PostingState.DONE and not self.ended_ns:
            self.ended_ns = time.monotonic_ns()
        return state

    @property
    def error(self) -> str:
        assert self.posting is not None
        return self.posting.error


class _Remote:
    """Implements `Remote`."""

    def __init__(self, remote: Remote, began: Callable[[_Read], None], polled: bool) -> None:
        self._remote = remote
        self._began = began
        self._polled = polled

    @property
    def why(self) -> str:
        return self._remote.why

    @property
    def process(self) -> PeerProcess | None:
        return self._remote.process

    def read(self, runs: Runs, wake: Callable[[], None]) -> _Read:
        read = _Read(wake)
        # A polled path calls `wake` between slices, not at its end.
        read.posting = self._remote.read(runs, wake if self._polled else read.wake)
        self._began(read)
        return read

    def ends_at_once(self, runs: Runs) -> bool:
        return isinstance(self._remote, PromptRemote) and self._remote.ends_at_once(runs)

    def close(self) -> None:
        self._remote.close()


class _Path:
    """Implements `DataPath`."""

    def __init__(self, path: DataPath, began: Callable[[_Read], None]) -> None:
        self._path = path
        self._began = began
        self.name = path.name
        self.needs_polling = path.needs_polling
        self.peers_need_turns = path.peers_need_turns

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        return self._path.offer(endpoint, peer)

    def withdraw(self, peer: str) -> None:
        self._path.withdraw(peer)

    def question(self, endpoint: RankEndpoint) -> Question | None:
        return self._path.question(endpoint)

    def connect(self, endpoint: RankEndpoint, answer: Answer | str) -> _Remote:
        return _Remote(self._path.connect(endpoint, answer), self._began, self.needs_polling)

    def progress(self) -> None:
        self._path.progress()

    def close(self) -> None:
        self._path.close()
