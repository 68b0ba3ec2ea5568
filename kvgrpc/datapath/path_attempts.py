"""Attempts to connect a rank of a peer: its allowed data paths are tried in order until one connects.

Only the mover's thread uses them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from kvgrpc.core.events import MeetingBegan, PeerMapped
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.asker import Asker, PendingQuestion
from kvgrpc.datapath.base import (
    DataPath,
    DataPathFailed,
    DataPathUnavailable,
    NotMet,
    ReachAttempt,
    Remote,
    SentByPeers,
)
from kvgrpc.datapath.guarded_calls import ask_before, connect, reach
from kvgrpc.datapath.questions import Answer, Question
from kvgrpc.datapath.reports import Report

Name = tuple[str, int]
"""A peer, and its rank."""


@dataclass
class ConnectAttempt:
    """A connect in progress: the paths still to try, and why the others were not taken."""

    peer: str
    endpoint: RankEndpoint
    allowed: list[str]
    number: int = 0
    """Number by which the caller knows the attempt."""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    question: PendingQuestion | None = None
    """Question that the peer's process is being asked."""
    reaching: ReachAttempt | None = None
    """Attempt of a path that makes its way to the peer's rank."""
    not_met: list[NotMet] = field(default_factory=list)
    """Reasons why the two ranks did not meet, for each path by which they began to."""
    cancelled: bool = False

    @property
    def name(self) -> Name:
        return self.peer, self.endpoint.rank

    @property
    def permanent(self) -> bool:
        """True if the two ranks did not meet, and will not when they try again."""
        return bool(self.not_met) and all(isinstance(why, DataPathUnavailable) for why in self.not_met)


class PathAttempts:
    """Attempts in progress, one a rank of a peer.

    `later` runs something in the mover's thread. `connected` is called before PeerMapped reports a connected rank.
    """

    def __init__(
        self,
        rank: int,
        paths: Mapping[str, DataPath],
        later: Callable[[Callable[[], None]], None],
        report: Callable[[Report], None],
        connected: Callable[[ConnectAttempt, DataPath, Remote], None],
    ) -> None:
        self._rank = rank
        self._paths = paths
        self._later = later
        self._report = report
        self._connected = connected
        self._asker = Asker(f"kvgrpc-connect-{rank}")
        self._attempts: dict[Name, ConnectAttempt] = {}

    def __iter__(self) -> Iterator[Name]:
        return iter(self._attempts)

    def __contains__(self, name: Name) -> bool:
        return name in self._attempts

    def begin(self, attempt: ConnectAttempt) -> None:
        """Begins an attempt; PeerMapped answers."""
        self._attempts[attempt.name] = attempt
        self._try_next(attempt)

    def refuse(self, attempt: ConnectAttempt, why: str) -> None:
        """Reports an attempt whose remaining paths are not tried."""
        attempt.rejected += [(name, why) for name in attempt.allowed]
        self._mapped(attempt)

    def cancel(self, name: Name, why: str) -> None:
        """Ends the attempt to connect a rank."""
        attempt = self._attempts.pop(name)
        attempt.cancelled = True
        if attempt.question is not None:
            self._asker.cancel(attempt.question)
        if attempt.reaching is not None:
            attempt.reaching.cancel()
        self.refuse(attempt, why)

    def close(self, why: str) -> None:
        """Cancels all attempts."""
        self._asker.close()
        for name in list(self._attempts):
            self.cancel(name, why)

    def _try_next(self, attempt: ConnectAttempt) -> None:
        """Tries the paths until one connects, or one has to ask or reach the peer first."""
        while attempt.allowed:
            name = attempt.allowed.pop(0)
            path = self._paths.get(name)
            if path is None:
                attempt.rejected.append((name, "this rank has no such data path"))
                continue
            if isinstance(path, SentByPeers):
                reached = partial(self._reached, attempt, path)
                reaching = reach(path, self._rank, attempt.peer, attempt.endpoint, reached)
                if isinstance(reaching, str):
                    attempt.rejected.append((name, reaching))
                    continue
                self._report(MeetingBegan(self._rank, attempt.peer, attempt.number, attempt.endpoint.rank))
                if not isinstance(reaching, DataPathFailed):
                    attempt.reaching = reaching
                    return
                attempt.not_met.append(reaching)
                attempt.rejected.append((name, reaching.message))
                continue
            question = ask_before(path, attempt.endpoint)
            if isinstance(question, Question):
                # An older peer, whose ranks are asked only by ranks of the same number, does not understand a number.
                rank = None if attempt.endpoint.rank == self._rank else self._rank
                attempt.question = self._asker.ask(question, partial(self._hand_over, attempt, path), rank)
                return
            if self._conclude(attempt, path, question or connect(path, attempt.endpoint)):
                return
        del self._attempts[attempt.name]
        self._mapped(attempt, permanent=attempt.permanent)

    def _hand_over(self, attempt: ConnectAttempt, path: DataPath, answer: Answer | str) -> None:
        """Hands the answer to the mover's thread. The asker's thread calls it."""
        self._later(partial(self._answered, attempt, path, answer))

    def _answered(self, attempt: ConnectAttempt, path: DataPath, answer: Answer | str) -> None:
        try:
            if attempt.cancelled:
                return
            if not self._conclude(attempt, path, connect(path, attempt.endpoint, answer)):
                self._try_next(attempt)
        finally:
            if isinstance(answer, Answer):
                answer.close()

    def _reached(self, attempt: ConnectAttempt, path: DataPath, outcome: Remote | NotMet) -> None:
        """Takes the outcome of an attempt that a path made."""
        attempt.reaching = None
        if isinstance(outcome, NotMet):
            attempt.not_met.append(outcome)
        if not self._conclude(attempt, path, outcome.message if isinstance(outcome, NotMet) else outcome):
            self._try_next(attempt)

    def _conclude(self, attempt: ConnectAttempt, path: DataPath, outcome: Remote | str) -> bool:
        """Records an outcome. Returns True if the peer is connected now."""
        if isinstance(outcome, str):
            attempt.rejected.append((path.name, outcome))
            return False
        del self._attempts[attempt.name]
        self._connected(attempt, path, outcome)
        self._mapped(attempt, path.name, outcome.why)
        return True

    def _mapped(self, attempt: ConnectAttempt, path: str = "", why: str = "", *, permanent: bool = False) -> None:
        """Reports the end of an attempt. No path: none connected."""
        peer, peer_rank = attempt.name
        rejected = tuple(attempt.rejected)
        self._report(PeerMapped(self._rank, peer, path, why, rejected, attempt.number, peer_rank, permanent))
