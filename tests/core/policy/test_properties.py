"""Each allocation and each kept block has exactly one end, whatever schedulers do and however transfers end."""

from collections import Counter

from hypothesis import given, settings, strategies as st
from hypothesis.strategies import DataObject

from kvgrpc.core.policy.policy import Policy
from kvgrpc.core.policy.values import (
    Arrival,
    Begin,
    Cancel,
    Give,
    HandOverBlocks,
    HandOverPart,
    LoadEnded,
    Loss,
    ModeChoice,
    OnLoss,
    Outcome,
    RequestSide,
    Reserve,
    Rules,
    SendEnded,
    Start,
    Take,
    Task,
    Told,
)
from kvgrpc.core.values.layout import Group, GroupKind
from kvgrpc.errors import NextStep, Reason

GROUP = Group("full", GroupKind.FULL_ATTENTION, 2, 16, 64, 1, 8, "uint8")
LOSS = Loss(Reason.PEER_LOST, "gone", NextStep.RECOMPUTE)
TABLE = (tuple(range(8)),)
IDS = ("a", "b")

modes = st.sampled_from(ModeChoice)
takes = st.none() | st.builds(
    Take, st.sampled_from([ModeChoice.PULL, ModeChoice.PUSH]), st.integers(1, 128), st.booleans()
)
gives = st.none() | st.builds(Give, modes, st.booleans())


class World:
    """A scheduler that makes random calls, and transfers that each end once."""

    def __init__(self, data: DataObject) -> None:
        self.data = data
        self.policy = Policy(Rules((GROUP,), data.draw(st.sampled_from(OnLoss)), 16, staged=data.draw(st.booleans())))
        self.open: dict[tuple[str, RequestSide], bool] = {}
        """Open transfers, by request id and side -> whether they have failed."""
        self.waiting: set[str] = set()
        """Requests whose pull has no blocks yet, and so cannot succeed."""
        self.awaited: Counter[str] = Counter()
        self.kept: set[str] = set()
        self.ended: Counter[str] = Counter()

    def step(self) -> None:
        draw, policy = self.data.draw, self.policy
        id_ = draw(st.sampled_from(IDS))
        computed = draw(st.integers(0, 128))
        match draw(st.integers(0, 9)):
            case 0:
                if id_ not in policy:
                    policy.arrived(
                        Arrival(id_, draw(st.integers(0, 128)), draw(takes), draw(gives), draw(st.booleans()))
                    )
            case 1:
                tokens = policy.match(id_, computed).tokens * draw(st.booleans())
                policy.allocated(id_, TABLE, computed, tokens)
                self.awaited[id_] += bool(tokens)
            case 2:
                policy.computed(id_, TABLE, computed, 1)
            case 3:
                policy.preempted(id_)
            case 4:
                self.left(id_, policy.finished(id_, TABLE, computed, draw(st.sampled_from(Outcome))).keep)
            case 5:
                self.left(id_, policy.aborted(id_).keep)
            case 6:
                policy.loaded(id_)
            case 7:
                policy.wanted(id_)
            case _:
                self.news()
        self.look()

    def left(self, id_: str, keep: bool) -> None:
        """Records that kept blocks have an end to come; asserts that a request without kept blocks is forgotten."""
        if keep:
            self.kept.add(id_)
        else:
            assert id_ not in self.policy

    def news(self) -> None:
        if self.open:
            name = self.data.draw(st.sampled_from(sorted(self.open, key=str)))
            begun = name[1] is RequestSide.GIVE or name[0] not in self.waiting
            self.end(*name, failed=self.data.draw(st.booleans()) or not begun)

    def end(self, id_: str, side: RequestSide, *, failed: bool) -> None:
        """Feeds one piece of news about a transfer."""
        if self.open[id_, side]:
            del self.open[id_, side]
            self.policy.returned(id_, side)
        elif failed:
            self.open[id_, side] = True
            self.policy.failed(id_, side, LOSS)
        else:
            del self.open[id_, side]
            self.policy.received(id_, 1 << 20) if side is RequestSide.TAKE else self.policy.returned(id_, side)

    def look(self) -> None:
        for task in self.policy.take_tasks():
            self.perform(task)
        for told in self.policy.take_told():
            self.hear(told)

    def perform(self, task: Task) -> None:
        if isinstance(task, Begin | Reserve):
            self.open[task.request_id, RequestSide.TAKE] = False
            if isinstance(task, Begin):
                self.waiting.add(task.request_id)
        elif isinstance(task, HandOverBlocks | HandOverPart):
            self.open.setdefault((task.request_id, RequestSide.GIVE), False)
        elif isinstance(task, Start):
            assert (task.request_id, RequestSide.TAKE) in self.open, "a pull begins before it gets its blocks"
            self.waiting.discard(task.request_id)
        elif isinstance(task, Cancel) and (task.request_id, task.side) in self.open:
            self.open[task.request_id, task.side] = False

    def hear(self, told: Told) -> None:
        if isinstance(told, LoadEnded):
            self.awaited[told.request_id] -= 1
            assert self.awaited[told.request_id] >= 0, "told twice"
        elif isinstance(told, SendEnded):
            assert told.request_id in self.kept
            self.ended[told.request_id] += 1

    def finish(self) -> None:
        """Lets every request leave and every transfer end, and asserts that nothing is left."""
        for id_ in IDS:
            self.left(id_, self.policy.aborted(id_).keep)
            self.look()
        while self.open:
            self.end(*next(iter(self.open)), failed=False)
            self.look()
        for id_ in IDS:
            self.policy.loaded(id_)
        self.look()
        assert not +self.awaited
        assert len(self.policy) == 0


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_every_wait_ends_once_and_nothing_is_left_at_the_end(data: DataObject) -> None:
    world = World(data)
    for _ in range(data.draw(st.integers(1, 25))):
        world.step()
    world.finish()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_blocks_that_are_given_away_are_never_reported_free(data: DataObject) -> None:
    """The policy keeps a request while one of its transfers is open."""
    world = World(data)
    for _ in range(data.draw(st.integers(1, 25))):
        world.step()
        given = {id_ for id_, side in world.open if side is RequestSide.GIVE}
        assert given <= {id_ for id_ in IDS if id_ in world.policy}
    world.finish()
