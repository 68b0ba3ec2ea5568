"""Worlds in which bytes move only if both ranks act, and the wires that carry these bytes.

For many more seeds: `python -m sim --collective`. `test_mutants` shows the bugs of leads that trust a send too much.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.actions import FailedNews, Post
from kvgrpc.core.events import Event, PeerMapped, PostSendAnswered
from kvgrpc.core.values.byte_runs import Runs
from sim import Outcome, World, drawn, run
from sim.engine.requests import PromptOffer, PromptWish
from sim.world.memory import Prompt
from sim.world.wires import Wire, WireRead, Wires, cells_in
from tests.core.nodes import ids

FIRST = 9_700
SEEDS = 10
STEPS = 1_500


class Heard:
    """Counts how ranks reached each other, and the answers to their sends."""

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()
        self.sends: Counter[str] = Counter()

    def event(self, _: str, __: float, event: Event) -> None:
        if isinstance(event, PeerMapped):
            self.paths[event.data_path] += 1
        elif isinstance(event, PostSendAnswered) and event.answer.sequence:
            said = "refused" if event.answer.known else "not known"
            self.sends[said if event.answer.error else "sent"] += 1

    def actions(self, *_: object) -> None: ...

    def note(self, *_: object) -> None: ...


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [{}, {"unlike": True}, {"mirrors": True}, {"liars": True}],
    ids=["alike", "unlike", "with mirrors", "with a liar"],
)
def test_every_rule_holds_where_both_ranks_have_to_act(kind: dict[str, Any]) -> None:
    total, heard, some = Outcome(), Heard(), set()
    for seed in range(FIRST, FIRST + SEEDS):
        setup = drawn(seed, STEPS, collective=True, **kind)
        some.add(setup.collective == setup.engines)
        total.add(run(setup, heard))
    assert total.violations == []
    assert total.ends["receive succeeded"] > 3 * SEEDS
    assert heard.paths["collective"] > 10 * SEEDS
    assert heard.sends["sent"] > SEEDS
    assert heard.sends["not known"] > 0
    assert some == {True, False}


def pull(world: World, number: int, ends: list[object]) -> None:
    source, destination = world.hosts
    key, prompt = number.to_bytes(16, "big"), Prompt(tuple(range(40)))
    token = source.engine.offer(PromptOffer(key, "r", prompt))
    assert token is not None
    destination.engine.pull(PromptWish("r", prompt, key), token, ends.append)


def test_a_source_that_is_stopped_sends_nothing_meanwhile_and_goes_on() -> None:
    world, ends = World(seed=1, collective=2), list[object]()
    pull(world, 1, ends)
    world.run(2.0)
    pull(world, 2, ends)
    world.agenda.after(0.002, lambda: world.hosts[0].stop(0.5, movers_s=0.5))
    world.run(0.4)
    assert ends == [None], "by shared memory it would have come"
    world.run(2.0)
    assert ends == [None, None]
    world.finish()


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.003, 0.005, 0.008, 0.012])
@pytest.mark.parametrize("who", [0, 1], ids=["source", "destination"])
def test_a_rank_may_die_between_any_two_steps_and_the_next_lives_meet_anew(who: int, after_s: float) -> None:
    world, ends = World(seed=1, collective=2), list[object]()
    pull(world, 1, ends)
    world.agenda.after(after_s, lambda: world.hosts[who].lose_rank(0, back_after_s=1.0))
    world.run(30.0)
    assert len(ends) == (1 if who == 0 else len(ends))
    assert all(end is None or isinstance(end, FailedNews) for end in ends)
    ends.clear()
    pull(world, 2, ends)
    world.run(30.0)
    assert ends == [None]
    world.finish()


def test_engines_of_which_one_only_sends_when_it_is_asked_to_use_what_both_have() -> None:
    heard, ends = Heard(), list[object]()
    world = World(seed=1, collective=1, watcher=heard)
    pull(world, 1, ends)
    world.run(2.0)
    assert ends == [None]
    assert set(heard.paths) == {"loopback"}
    world.finish()


# -- wires


class Taken:
    """A receive that records what it got."""

    def __init__(self, *cells: int) -> None:
        where = ids(*cells)
        self.post = Post(0, "p", "peer", Runs(where, where, np.ones_like(where)), "t")
        self.wire: Wire | None = None
        self.sent: dict[int, int] = {}


class End:
    """The receiving end of a wire."""

    def __init__(self) -> None:
        self.begun: list[WireRead] = []
        self.failed: list[WireRead] = []
        self.wire = Wire(self.begun.append, self.failed.append, cell_bytes=1)


def test_nothing_comes_before_it_is_sent_and_before_it_is_received() -> None:
    end, first, second = End(), Taken(1, 2), Taken(3)
    end.wire.receive(first)
    assert end.wire.starves(first)
    assert not end.begun
    end.wire.send([1, 2])
    assert end.begun == [first]
    assert not end.wire.starves(first)
    end.wire.send([3])
    end.wire.receive(second)
    assert end.begun == [first], "one after the other"
    end.wire.ended(first, done=True)
    assert end.begun == [first, second]
    assert not first.sent
    assert not second.sent


def test_a_receive_gets_what_is_sent_next_whatever_it_asked_for() -> None:
    end, taken = End(), Taken(3, 4)
    end.wire.send([7, 4])
    end.wire.receive(taken)
    assert taken.sent == {3: 7}
    end.wire.ended(taken, done=True)
    short = Taken(5)
    end.wire.receive(short)
    end.wire.send([5, 6])
    assert end.failed == [short]
    assert end.wire.broken


def test_all_that_is_on_a_wire_fails_with_it_and_what_comes_later_too() -> None:
    end, first, second, third = End(), Taken(1), Taken(2), Taken(3)
    for taken in (first, second):
        end.wire.send([1])
        end.wire.receive(taken)
    end.wire.ended(first, done=False)
    assert end.failed == [second]
    end.wire.receive(third)
    end.wire.break_("again")
    assert end.failed == [second, third]
    assert end.begun == [first]


def test_a_source_comes_to_a_wire_once_and_to_none_that_broke() -> None:
    wires, made = Wires(), [End().wire for _ in range(2)]
    names = [wires.add(wire) for wire in made]
    assert wires.take(names[0]) is made[0]
    assert wires.take(names[0]) is None
    made[1].break_("nobody came")
    assert wires.take(names[1]) is None
    assert wires.take(b"another") is None


def test_cells_are_those_of_which_some_byte_is_asked_for() -> None:
    assert cells_in(ids(4, 15), ids(8, 2), 4) == [1, 2, 3, 4]
    assert cells_in(ids(), ids(), 4) == []
