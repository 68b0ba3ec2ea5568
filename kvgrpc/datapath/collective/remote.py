"""A peer's rank that sends, with this rank as the destination. Only the mover's thread uses it."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.sends import MEET, SendAnswer, SendAsk, Values
from kvgrpc.datapath.base import Buffer, DataPathFailed, DataPathUnavailable, NotMet, PostingState
from kvgrpc.datapath.collective.group import GLOO, NCCL, WINDOW, GroupJob, ProcessGroup
from kvgrpc.datapath.collective.messages import messages
from kvgrpc.datapath.host.addresses import check_runs
from kvgrpc.datapath.host.memory import memory_bytes

WHAT = {NCCL: "NCCL", GLOO: "Gloo, over TCP", WINDOW: "same host, by a window that this rank alone maps"}
"""Description of how bytes move, for people, by library."""


@dataclass(eq=False)
class CollectiveRead:
    """A read that waits for its turn, for the source's answer, or for the bytes."""

    posting_id: str
    runs: Runs
    job: GroupJob
    regrouped: bool = False
    """True if a process group was made for this read."""

    def poll(self) -> PostingState:
        return self.job.poll()

    @property
    def error(self) -> str:
        return self.job.error


class GroupOwner(Protocol):
    """The part of a path that its remotes use."""

    @property
    def message_bytes(self) -> int: ...

    def make_group(
        self, peer: tuple[str, int], *, sends: bool, told: Callable[[Values], None], ready: Callable[[], None]
    ) -> ProcessGroup:
        """Makes one side of a group with a rank of a peer. `told` and `ready` are called from the mover's thread.
        Raises DataPathFailed if too many are being made.
        """

    def next_epoch(self) -> int:
        """Returns the epoch of the next group that receives: higher than all before."""

    def retire(self, group: ProcessGroup, why: str) -> None: ...

    def forget(self, remote: "CollectiveRemote") -> None: ...


class CollectiveRemote:
    """A peer's rank that sends. `source` is its library and the size of its memory. `want` asks the peer, for a posting
    or for none. `reached` gets this remote once the first group was made, or why it was not.
    """

    process = None

    def __init__(  # noqa: PLR0913 - it needs this much of both sides
        self,
        path: GroupOwner,
        key: tuple[str, int],
        source: tuple[str, int],
        own: Sequence[Segment],
        want: Callable[[str, SendAsk], None],
        reached: Callable[["CollectiveRemote | NotMet"], None],
        *,
        rank: int,
    ) -> None:
        self.key = key
        self._path = path
        self._rank = rank
        self._library, self._source_bytes = source
        self._own = own
        self._want = want
        self._reached: Callable[[CollectiveRemote | NotMet], None] | None = reached
        self._epoch = 0
        self._sequence = MEET
        self._asked = False
        """True while the peer has not answered an ask."""
        self._group: ProcessGroup | None = None
        self._built = False
        self._is_replaced = False
        self._waiting: deque[CollectiveRead] = deque()
        """Reads for which the peer was not asked, or has not answered."""
        self._meet()

    @property
    def why(self) -> str:
        what = WHAT[self._library]
        return f"{what}: rank {self.key[1]} of the peer sends, when it is asked to, of {self._source_bytes} bytes"

    def read(self, runs: Runs, wake: Callable[[], None]) -> CollectiveRead:
        return self.read_sent("", runs, wake)

    def read_sent(
        self, posting_id: str, runs: Runs, wake: Callable[[], None], buffer: Buffer | None = None
    ) -> CollectiveRead:
        own = self._own if buffer is None else (buffer.segment,)
        check_runs(runs, self._source_bytes, memory_bytes(own))
        some = runs.nbytes > 0
        runs = Runs(runs.src[some], runs.dst[some], runs.nbytes[some])
        receive = CollectiveRead(
            posting_id, runs, GroupJob(messages(runs, own, sends=False, most_bytes=self._path.message_bytes), wake)
        )
        if len(runs):
            self._waiting.append(receive)
            self._go_on()
        else:
            receive.job.end()
        return receive

    def answered(self, answer: SendAnswer) -> None:
        """Takes the source's answer to the ask of that number."""
        if not self._asked or (answer.epoch, answer.sequence) != (self._epoch, self._sequence):
            return
        self._asked = False
        assert self._group is not None
        if answer.sequence != MEET:
            self._sent(answer, self._group)
        elif answer.error:
            why = f"rank {self.key[1]} of the peer says: {answer.error}"
            self._not_met(DataPathUnavailable(why) if answer.permanent else DataPathFailed(why))
        else:
            self._group.learn(answer.values)

    def _sent(self, answer: SendAnswer, group: ProcessGroup) -> None:
        receive = self._waiting.popleft()
        if not answer.error:
            group.start(answer.sequence, receive.job)
        elif answer.regroup and not receive.regrouped:
            receive.regrouped = True
            self._waiting.appendleft(receive)
            self._end_group(answer.error)
        elif answer.known and not answer.regroup:
            self._sequence -= 1  # a refused send takes no number
            receive.job.end(answer.error)
        else:
            self._end_group(answer.error)
            receive.job.end(answer.error)
        self._go_on()

    def close(self) -> None:
        self._end_group("the peer is disconnected")
        self._path.forget(self)

    def replaced(self) -> None:
        """Ends the reads of this remote, whose rank is reached anew: a rank sends to one group of this rank only."""
        self._is_replaced = True
        self._not_met(DataPathFailed("the peer's rank is reached anew"))

    def cancel(self) -> None:
        """Closes the remote: nobody waits for it to be reached any more."""
        self._reached = None
        self.close()

    # ---- the group

    def _go_on(self) -> None:
        """Asks for the next read, one at a time, so that the numbers reach the source in order."""
        if self._is_replaced:
            self._not_met(DataPathFailed("the peer's rank is reached anew"))
        if not self._waiting or self._asked:
            return
        if self._group is None or (self._built and self._group.broken):
            self._end_group("it broke")
            try:
                self._meet()
            except DataPathFailed as error:
                self._not_met(error)
        elif self._built:
            self._sequence, self._asked = self._sequence + 1, True
            first = self._waiting[0]
            ask = SendAsk(self.key[1], self._rank, self._epoch, self._sequence, first.runs.src, first.runs.nbytes)
            self._want(first.posting_id, ask)

    def _meet(self) -> None:
        """Makes the group of the next epoch. Raises DataPathFailed if too many are being made."""

        def told(values: Values) -> None:
            if self._group is group:
                first = self._waiting[0].posting_id if self._waiting else ""
                self._want(first, SendAsk(self.key[1], self._rank, self._epoch, MEET, values=values))

        def ready() -> None:
            if self._group is group:
                self._ready(group)

        group = self._path.make_group(self.key, sends=False, told=told, ready=ready)
        self._group, self._epoch = group, self._path.next_epoch()
        self._sequence, self._asked, self._built = MEET, True, False  # until the group is made or fails

    def _ready(self, group: ProcessGroup) -> None:
        """Takes the news that the group is made, or cannot be."""
        if group.broken:
            self._not_met(group.not_met)
            return
        self._built = True
        reached, self._reached = self._reached, None
        if reached is not None:
            reached(self)
        self._go_on()

    def _not_met(self, why: NotMet) -> None:
        """Ends an epoch without a group: its waiting reads fail, and the next read begins another epoch."""
        self._end_group(why.message)
        reached, self._reached = self._reached, None
        if reached is not None:
            reached(why)
        waiting, self._waiting = self._waiting, deque()
        for receive in waiting:
            receive.job.end(why.message)

    def _end_group(self, why: str) -> None:
        group, self._group, self._built, self._asked = self._group, None, False, False
        if group is not None:
            self._path.retire(group, why)
