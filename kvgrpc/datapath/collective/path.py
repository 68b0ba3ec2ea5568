"""Path `collective`: the source's rank sends, the destination's receives, over a process group of torch.distributed.

Gloo, over TCP, serves host memory: it is the way between hosts without RDMA. NCCL serves memory of CUDA devices. A
group has two ranks and one direction, and is made when the path is chosen. Each read asks the source to send, by way of
both leads, and receives once the source has answered. Sends have numbers, and are processed in order. Whatever breaks a
group ends all that is on it; the next read makes a group of the next epoch.

A send does not say what has arrived: only the destination knows that.
"""

import importlib.util
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import CollectiveEndpoint, RankEndpoint
from kvgrpc.core.values.sends import MEET, SendAnswer, SendAsk, Values
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, NotMet, PostingState, Remote
from kvgrpc.datapath.collective.group import BUILD_S, GLOO, NCCL, PROOF_S, STALL_S, GroupJob, GroupLibrary, ProcessGroup
from kvgrpc.datapath.collective.half import read_half
from kvgrpc.datapath.collective.messages import FRAMING, MESSAGE_BYTES_MAX, messages
from kvgrpc.datapath.collective.remote import CollectiveRemote
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.collective.unmade_groups import UnmadeGroups
from kvgrpc.datapath.host.addresses import check_runs
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory, is_host, memory_bytes

JOBS_MAX = 1_024
"""Maximum number of sends of one group that wait for earlier ones."""
WAITING_RUNS_MAX = 1 << 19
"""Maximum number of runs of all waiting sends: four times what a posting has."""
END_S = max(BUILD_S + PROOF_S, STALL_S) + 5.0
"""Time that `close` waits for the library, in seconds: longer than it may take for anything."""


def _load_torch() -> None:
    import kvgrpc.datapath.collective.rendezvous_store  # noqa: F401


@dataclass(eq=False)
class _Sender:
    """This rank as the source of one rank of a peer."""

    epoch: int
    group: ProcessGroup
    sequence: int = MEET
    jobs: deque[tuple[GroupJob, int]] = field(default_factory=deque)
    """Sends that have not ended, with the numbers of their runs."""
    anew: bool = False
    """True if the peer has shaken hands since: its next group may have any epoch."""


class CollectivePath:
    """Sends this rank's memory to ranks of peers that ask for it, and receives from those that it asks. `host` is this
    host's address for peers. `load` loads the library, from any thread.
    """

    name = "collective"
    needs_polling = False
    peers_need_turns = False
    framing = FRAMING
    message_bytes = MESSAGE_BYTES_MAX

    def __init__(
        self, memory: SharedMemory | PrivateMemory, host: str, load: Callable[[], None] | None = _load_torch,
        backend: str = "",
    ) -> None:  # fmt: skip
        if load is not None and importlib.util.find_spec("torch") is None:
            raise DataPathUnavailable("torch is not installed: install kvgrpc's extra 'torch'")
        self._backend = backend or (GLOO if is_host(memory.segments) else NCCL)
        self._segments = memory.segments
        self._nbytes = memory_bytes(memory.segments)
        self._keeps = memory
        self._host = host
        self._load = load or (lambda: None)
        self._later: Callable[[Callable[[], None]], None] = lambda act: act()
        self._want: Callable[[str, str, SendAsk], None] = lambda *_: None
        self._senders: dict[tuple[str, int], _Sender] = {}
        self._remotes: dict[tuple[str, int], CollectiveRemote] = {}
        self._epoch = 0
        """Epoch of the last group that received. All peers share it: a peer declared dead may come back."""
        self._unmade = UnmadeGroups()
        self._retired: list[ProcessGroup] = []
        """Broken groups whose threads may not have ended yet."""

    def bind(self, later: Callable[[Callable[[], None]], None], want: Callable[[str, str, SendAsk], None]) -> None:
        self._later, self._want = later, want

    def load(self) -> None:
        self._load()

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        for sender in [sender for key, sender in self._senders.items() if key[0] == peer]:
            sender.anew = True
        return replace(endpoint, collective=CollectiveEndpoint(self._backend, self._nbytes, FRAMING))

    def withdraw(self, peer: str) -> None:
        for key in [key for key in self._senders if key[0] == peer]:
            self.retire(self._senders.pop(key).group, "the peer is gone")
        self._unmade.forget(peer)

    def question(self, _: RankEndpoint) -> None:
        return None

    def connect(self, *_: object) -> Remote:
        raise DataPathUnavailable("both ranks have to come")

    def reach(
        self, rank: int, peer: str, endpoint: RankEndpoint, reached: Callable[[Remote | NotMet], None]
    ) -> CollectiveRemote:
        part, key = self._part(endpoint), (peer, endpoint.rank)
        if part is None:
            raise DataPathUnavailable("the peer offers no process group")
        backend, nbytes, framing = part
        if backend != self._backend:
            why = f"the peer offers a process group of {backend}, this rank's memory takes one of {self._backend}"
            raise DataPathUnavailable(why)
        if framing != self.framing:
            why = f"the peer cuts sends by framing {framing}, this rank by {self.framing}: have both run one version"
            raise DataPathUnavailable(why)
        self._unmade.check((*key, False))
        want = partial(self._want, peer)
        if (before := self._remotes.get(key)) is not None:
            before.replaced()
        remote = CollectiveRemote(self, key, (backend, nbytes), self._segments, want, reached, rank=rank)
        self._remotes[key] = remote
        return remote

    def answered(self, peer: str, answer: SendAnswer) -> None:
        if (remote := self._remotes.get((peer, answer.source_rank))) is not None:
            remote.answered(answer)

    def send(self, peer: str, ask: SendAsk, posted: Callable[[Values, NotMet | None], None]) -> None:
        try:
            if ask.meets:
                self._meet((peer, ask.rank), ask, posted)
            else:
                self._send((peer, ask.rank), ask)
                posted((), None)
        except (DataPathUnavailable, DataPathFailed) as error:
            posted((), error)

    def progress(self) -> None:
        """Does nothing: each group has a thread."""

    def close(self) -> None:
        """Ends all groups. Raises DataPathFailed if the thread of one does not end."""
        for sender in self._senders.values():
            self.retire(sender.group, "the data path was closed")
        self._senders.clear()
        for remote in list(self._remotes.values()):
            remote.close()
        end = time.monotonic() + END_S
        self._retired = [group for group in self._retired if not group.join(max(end - time.monotonic(), 0.0))]
        if self._retired:
            raise DataPathFailed("a process group does not end")

    def _meet(self, key: tuple[str, int], ask: SendAsk, posted: Callable[[Values, NotMet | None], None]) -> None:
        before = self._senders.get(key)
        if before is not None and ask.epoch <= before.epoch and not before.anew:
            raise DataPathFailed(f"epoch {ask.epoch} is over: the process group is of epoch {before.epoch}")
        self._check_half(ask.values)
        answered = False

        def told(values: Values) -> None:
            answer(values, None)

        def ready() -> None:
            answer((), group.not_met if group.broken else None)

        def answer(values: Values, error: NotMet | None) -> None:
            nonlocal answered
            if not answered:
                answered = True
                posted(values, error)

        group = self.make_group(key, sends=True, told=told, ready=ready)
        group.learn(ask.values)
        self._senders[key] = _Sender(ask.epoch, group)
        if before is not None:
            self.retire(before.group, f"epoch {ask.epoch} takes its place")

    def _send(self, key: tuple[str, int], ask: SendAsk) -> None:
        sender = self._senders.get(key)
        if sender is None or ask.epoch != sender.epoch:
            raise DataPathFailed(f"there is no process group of epoch {ask.epoch}")
        if sender.group.broken:
            raise DataPathFailed(f"the process group of epoch {ask.epoch} broke: {sender.group.broken}")
        if ask.sequence != sender.sequence + 1:
            raise DataPathFailed(f"send {ask.sequence} does not follow send {sender.sequence}")
        runs = Runs(ask.offsets, ask.offsets, ask.nbytes)
        check_runs(runs, self._nbytes, self._nbytes)
        while sender.jobs and sender.jobs[0][0].poll() is not PostingState.PENDING:
            sender.jobs.popleft()
        if len(sender.jobs) >= JOBS_MAX:
            raise DataPathFailed(f"{JOBS_MAX} sends wait for those before them")
        if sender.jobs and sum(count for _, count in sender.jobs) + len(runs) > WAITING_RUNS_MAX:
            raise DataPathFailed(f"more than {WAITING_RUNS_MAX} runs wait for the sends before them")
        job = GroupJob(messages(runs, self._segments, sends=True, most_bytes=self.message_bytes), lambda: None)
        sender.sequence = ask.sequence
        sender.jobs.append((job, len(runs)))
        sender.group.start(ask.sequence, job)

    # ---- for its remotes

    def make_group(
        self, peer: tuple[str, int], *, sends: bool, told: Callable[[Values], None], ready: Callable[[], None]
    ) -> ProcessGroup:
        pair = (*peer, sends)
        self._unmade.check(pair)

        def later(act: Callable[..., None]) -> Callable[..., None]:
            return lambda *arguments: self._later(partial(act, *arguments))

        group = ProcessGroup(partial(self._library, sends), told=later(told), ready=later(ready))
        self._unmade.add(pair, group)
        return group

    def _library(self, sends: bool, rendezvous: Rendezvous) -> GroupLibrary:
        """Makes the library's group in the thread of its group, since loading takes seconds. At one handshake both
        leads let their ranks reach for each other, so that both load at once, before either asks the other.
        """
        self._load()
        if self._backend == NCCL:
            from kvgrpc.datapath.collective.nccl import NcclGroup

            return NcclGroup(sends=sends, device=self._segments[0].device, rendezvous=rendezvous)
        from kvgrpc.datapath.collective.gloo import GlooGroup

        return GlooGroup(sends=sends, host=self._host, rendezvous=rendezvous)

    def _part(self, endpoint: RankEndpoint) -> tuple[str, int, int] | None:
        """Returns library, size and framing of what the peer offers."""
        part = endpoint.collective
        return None if part is None else (part.backend, part.nbytes, part.framing)

    def _check_half(self, values: Values) -> None:
        """Raises DataPathFailed or DataPathUnavailable for values that are not half of a group to join."""
        if self._backend == GLOO:
            read_half(values, self._host)

    def next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def retire(self, group: ProcessGroup, why: str) -> None:
        group.abort(why)
        self._retired = [group for group in self._retired if not group.join(0)]
        self._retired.append(group)

    def forget(self, remote: CollectiveRemote) -> None:
        if self._remotes.get(remote.key) is remote:
            del self._remotes[remote.key]
