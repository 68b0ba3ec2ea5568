"""The steps of a modelled engine."""

from random import Random

from sim.engine.steps import Steps, Work
from sim.world.agenda import Agenda
from sim.world.memory import ALL_LAYERS


def test_steps_of_a_rank_are_over_in_their_order_each_with_what_it_does() -> None:
    agenda, ranks = Agenda(), range(2)
    did: dict[int, list[int]] = {rank: [] for rank in ranks}
    over: dict[int, list[int]] = {rank: [] for rank in ranks}
    steps = Steps(Random(1), [range(2)] * len(ranks), agenda.after, lambda done: over[done.rank].append(done.step))

    def work() -> None:
        step = steps.queue(Work(lambda rank, _: did[rank].append(step), lambda: None))

    for i in range(5_000):
        agenda.at(i * 1e-3, work)
    agenda.run(10.0)
    for rank in ranks:
        assert over[rank] == sorted(over[rank])
        assert did[rank] == sorted(did[rank])
        assert set(did[rank]) == set(over[rank])
        assert len(over[rank]) > 100


def test_a_step_may_be_done_layer_by_layer() -> None:
    agenda = Agenda()
    said: list[str] = []
    steps = Steps(Random(1), [range(2)], agenda.after, lambda done: said.append(f"{done.layers} done"))
    work = Work(lambda _, layers: said.append(f"{layers}"), lambda: said.append("all"))

    def begin() -> None:
        steps.queue(work)

    for at_s in range(20):
        agenda.at(at_s, begin)
    agenda.run(20.0)
    by_layer = ["(0, 1)", "(0, 1) done", "(1, 1)", "None done", "all"]
    whole = [f"{ALL_LAYERS}", "None done", "all"]
    kinds = set()
    while said:
        kind = by_layer if said[0] == "(0, 1)" else whole
        assert said[: len(kind)] == kind
        kinds.add(kind[0])
        del said[: len(kind)]
    assert len(kinds) == 2
