"""The steps of a modelled engine."""

from random import Random

from kvgrpc.sim.agenda import Agenda
from kvgrpc.sim.steps import Steps, Work


def test_steps_of_a_rank_are_over_in_their_order_each_with_what_it_does() -> None:
    agenda, ranks = Agenda(), range(2)
    did: dict[int, list[int]] = {rank: [] for rank in ranks}
    over: dict[int, list[int]] = {rank: [] for rank in ranks}
    steps = Steps(Random(1), len(ranks), agenda.after, lambda done: over[done.rank].append(done.step))

    def work() -> None:
        step = steps.queue(Work(lambda rank: did[rank].append(step), lambda: None))

    for i in range(5_000):
        agenda.at(i * 1e-3, work)
    agenda.run(10.0)
    for rank in ranks:
        assert over[rank] == sorted(over[rank])
        assert did[rank] == sorted(did[rank])
        assert set(did[rank]) == set(over[rank])
        assert len(over[rank]) > 100
