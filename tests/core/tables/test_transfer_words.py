"""Words of transfers: runs produce each phase and wait that is stated, and no other."""

from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core.state.move import MoveStage
from kvgrpc.core.tables.transfer_table import TransferTable
from kvgrpc.core.tables.transfers import PHASES, WAITS, Transfer
from sim import drawn, run
from tests.core.cancels.pulled import at_stage

SEEDS = range(12)
STEPS = 600


def test_the_stages_of_moves_are_phases() -> None:
    assert {stage.value for stage in MoveStage if stage is not MoveStage.ENDED} <= set(PHASES)


def test_runs_produce_the_phases_and_waits_that_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    phases, waits = set[str](), set[str]()

    def seen(made: Callable[..., Transfer]) -> Callable[..., Transfer]:
        def make(*args: Any, **kwargs: Any) -> Transfer:
            transfer = made(*args, **kwargs)
            phases.update(phase.name for phase in transfer.phases)
            if transfer.failure is not None:
                phases.add(transfer.failure.phase)
            waits.add(transfer.waiting_for)
            return transfer

        return make

    monkeypatch.setattr(TransferTable, "create", seen(TransferTable.create))
    monkeypatch.setattr(TransferTable, "change", seen(TransferTable.change))
    for seed in SEEDS:
        run(drawn(seed, STEPS))
    at_stage("blocks")
    assert phases == set(PHASES)
    assert waits == set(WAITS)
