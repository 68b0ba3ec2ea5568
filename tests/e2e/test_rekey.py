"""Blocks in quarantine without a proof come back by a re-key that nobody asks for."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvgrpc.engine import BlocksReturned, Failed, content
from kvgrpc.v1 import admin_pb2
from tests.e2e.conftest import PATHS
from tests.e2e.pushing import BLOCKS, LIMITS, MIDWAY, SLOW, TOKENS, begin, check_end, check_unhurt
from tests.engine.support import Lead, Side
from tests.service.conftest import Start
from tests.service.engines import RETURNED, wait_until
from tests.service.pushes import check_a_good_push

FLAGS, TCP = PATHS["nixl-tcp"]


def generation(api: admin_pb2.ReleaseQuarantineResponse) -> int:
    """Returns the memory generation, after it checked that nothing was in quarantine."""
    assert (api.released_block_count, api.left_block_count) == (0, 0)
    return api.memory_generation


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_more_than_the_budget_comes_back_while_the_source_is_stopped(start: Start, rounds: int) -> None:
    """16 of 520 blocks exceed a hundredth. A later re-key ends a later quarantine."""
    budget = "quarantine_share = 0.01\nrekey_interval_s = 0.5\n"
    settings = f"source_writes = true\n{LIMITS}{budget}"
    source, destination = start(*[(*FLAGS, *SLOW)] * 2, settings=settings, **TCP)
    for number in range(1, rounds + 1):
        made = begin(source, destination, MIDWAY)
        with source.process.stopped():
            end = destination.wait(made.received, returned=False)
            check_end(end)
            again = destination.wait(made.received)
            assert (again.state, again.memory) == (end.state, RETURNED)
            release = destination.api.admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest())
            assert generation(release) == number
            later = destination.write(made.target, seed=200)
        check_a_good_push(source, destination)
        assert destination.read(made.target) == later
    check_unhurt(source)
    check_unhurt(destination)


def test_without_spares_a_grace_returns_blocks(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own read of a stopped source does not end. Its blocks are within the budget, but it has no spares."""
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)
    (source,) = start(FLAGS, settings=LIMITS, **TCP)
    with ExitStack() as stack:
        lead = Lead(tmp_path, "D", *FLAGS, *SLOW, settings=LIMITS)
        stack.callback(lead.close)
        side = Side(lead.wait_ready(), sets_aside=False)
        stack.callback(side.close)
        target, blocks = list(range(BLOCKS)), source.allocate(BLOCKS)
        source.write(blocks, seed=1)
        pull = side.engine.pull(source.hand_over(TOKENS, blocks).grant.token, content(TOKENS))
        pull.start(target)
        side.engine.flush()
        wait_until(lambda: bool(side.view()[:, target].any()))
        with source.process.stopped():
            events = side.poll_until(lambda _: pull.over)
            assert [type(event) for event in events][-2:] == [Failed, BlocksReturned]
            # The read may end while the re-key goes on, which then counts its blocks.
            release = lead.api.admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest())
            assert (release.left_block_count, release.memory_generation) == (0, 1)
            later = side.fill(target, seed=200)
        again = side.engine.pull(source.hand_over(TOKENS).grant.token, content(TOKENS))
        again.start(list(range(BLOCKS, 2 * BLOCKS)))
        side.engine.flush()
        side.poll_until(lambda _: again.over)
        assert not again.failed
        assert (side.read(target) == later).all()
