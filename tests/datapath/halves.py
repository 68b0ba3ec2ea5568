"""Both halves of a process group in this process, without data paths, movers and leads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.collective.group import GroupJob, GroupLibrary, ProcessGroup
from kvgrpc.datapath.collective.messages import messages
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from tests.datapath.peers import DEADLINE_S
from tests.datapath.pumped import LONG_S


class Half:
    """A rank's half; `make` connects it by a library."""

    def __init__(self, make: Callable[[Rendezvous], GroupLibrary], own: Sequence[Segment], *, sends: bool) -> None:
        self.values: Values = ()
        """Values that it tells the other half."""
        self._own, self._sends = own, sends
        self._told, self._made, self._ended = threading.Event(), threading.Event(), threading.Event()
        self.group = ProcessGroup(make, told=self._tell, ready=self._made.set)

    def wait_told(self) -> None:
        assert self._told.wait(LONG_S)

    def wait_made(self) -> None:
        assert self._made.wait(LONG_S)
        assert not self.group.broken

    def start(self, runs: Runs) -> GroupJob:
        """Starts its part of the first send."""
        job = GroupJob(messages(runs, self._own, sends=self._sends), self._ended.set)
        self.group.start(1, job)
        return job

    def wait_ended(self) -> None:
        assert self._ended.wait(DEADLINE_S)

    def close(self) -> None:
        self.group.abort("the test is over")
        assert self.group.join(DEADLINE_S)

    def _tell(self, values: Values) -> None:
        self.values = values
        self._told.set()


@dataclass(frozen=True)
class Halves:
    """The halves of the source and the destination."""

    source: Half
    destination: Half

    @property
    def both(self) -> tuple[Half, Half]:
        return self.source, self.destination

    def learn(self) -> None:
        """Lets each half learn what the other one has told."""
        for half in self.both:
            half.wait_told()
        self.source.group.learn(self.destination.values)
        self.destination.group.learn(self.source.values)

    def meet(self) -> None:
        """Makes the group."""
        self.learn()
        for half in self.both:
            half.wait_made()

    def move(self, runs: Runs) -> list[GroupJob]:
        """Runs one send to its end, and returns the jobs of both halves."""
        jobs = [half.start(runs) for half in self.both]
        for half in self.both:
            half.wait_ended()
        return jobs

    def close(self) -> None:
        for half in self.both:
            half.close()
