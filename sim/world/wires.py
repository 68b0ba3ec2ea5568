"""Modelled process groups of two ranks and one direction: what one rank sends the other one receives, in order.

The k-th send meets the k-th receive, whatever either was meant for. Only numbers that both sides agree on tell sends
apart. Nothing arrives before both were posted.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvgrpc.core.actions import Post
from kvgrpc.core.values.block_ids import Ids

STALL_S = 10.0
"""Maximum time for which a receive may find nothing to receive, in seconds."""


class WireRead(Protocol):
    """A posting that reads over a wire."""

    post: Post
    wire: "Wire | None"
    """Wire of the posting, once the rank has heard that it is sent."""
    sent: dict[int, int]
    """Cells that were sent, by the cells that the posting takes them for, if they differ."""


def cells_in(offsets: Ids, nbytes: Ids, cell_bytes: int) -> list[int]:
    """Returns the cells of which these runs have bytes, run by run."""
    rows = zip(offsets.tolist(), nbytes.tolist(), strict=True)
    return [cell for at, count in rows for cell in range(at // cell_bytes, -(-(at + count) // cell_bytes))]


@dataclass(eq=False)
class Wire:
    """One wire. `begin` lets a posting take its cells, one after the other, and `fail` ends it, at the receiver."""

    begin: Callable[[WireRead], None]
    fail: Callable[[WireRead], None]
    cell_bytes: int
    broken: str = ""
    """Why nothing moves over the wire any more."""
    resumes_at: Callable[[], float] = lambda: 0.0
    """Returns the time until which the processes of the wire's source are stopped."""
    sends: deque[list[int]] = field(default_factory=deque)
    """Cells of each send that nobody receives yet, in order."""
    receives: deque[WireRead] = field(default_factory=deque)
    _begun: WireRead | None = None

    def send(self, cells: list[int]) -> None:
        """Lets the source's rank send, after its earlier sends."""
        self.sends.append(cells)
        self._turn()

    def receive(self, posting: WireRead) -> None:
        """Lets the destination's rank receive, after its earlier receives."""
        posting.wire = self
        self.receives.append(posting)
        if self.broken:
            self.fail(posting)
        else:
            self._turn()

    def starves(self, posting: WireRead) -> bool:
        """Returns True if nothing was sent for the next receive yet, and `posting` is that."""
        return self._begun is None and bool(self.receives) and self.receives[0] is posting

    def ended(self, posting: WireRead, *, done: bool) -> None:
        """Takes note that a receive is over. The next one begins, unless it failed."""
        self.receives.remove(posting)
        if self._begun is posting:
            self._begun = None
        if done and not self.broken:
            self._turn()
        else:
            self.break_("what came before it failed")

    def break_(self, why: str) -> None:
        """Breaks the wire: nothing moves over it any more, and what is on it fails."""
        if self.broken:
            return
        self.broken = why
        for posting in self.receives:
            self.fail(posting)

    def _turn(self) -> None:
        if self._begun is not None or not self.receives or not self.sends:
            return
        posting, sent = self.receives[0], self.sends.popleft()
        runs = posting.post.runs
        asked = cells_in(runs.src, runs.nbytes, self.cell_bytes)
        if len(asked) != len(sent):
            self.break_("the messages of both sides differ in length")
            return
        self._begun = posting
        posting.sent = {mine: theirs for mine, theirs in zip(asked, sent, strict=True) if mine != theirs}
        self.begin(posting)


class Wires:
    """The wires of a world that a source's rank may join, by the name that its peer tells."""

    def __init__(self) -> None:
        self._made = 0
        self._open: dict[bytes, Wire] = {}

    def add(self, wire: Wire) -> bytes:
        """Adds a wire. Returns its name."""
        self._made += 1
        name = f"wire-{self._made}".encode()
        self._open[name] = wire
        return name

    def take(self, name: bytes) -> Wire | None:
        """Returns that wire, once; None if nobody waits."""
        wire = self._open.pop(name, None)
        return None if wire is None or wire.broken else wire
