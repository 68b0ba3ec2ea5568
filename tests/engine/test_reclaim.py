"""An engine takes back blocks that no reader has claimed."""

import pytest

from kvgrpc.core.values.layout import PoolKind
from kvgrpc.engine import BlocksReturned, Failed, content
from kvgrpc.errors import DeadlineExceeded, InvalidRequest, NextStep, OutOfRange, Reason
from tests.engine.conftest import Attach, Leads
from tests.engine.made import BLOCKS
from tests.engine.support import Side, failure, refused, tokens

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]


def test_blocks_come_back_with_the_answer_and_readers_learn_it(pair: tuple[Side, Side]) -> None:
    source, destination = pair
    left, wanted = (source.hand_over(ids, PROMPT, firm_ttl_s=0.0) for ids in (SOURCE, [11, 12, 13]))
    answer = source.engine.reclaim(2)
    assert answer.enough
    assert [row.lease_id for row in answer.leases] == [left.lease_id]
    assert [ids.tolist() for ids in answer.freed] == [sorted(SOURCE)]
    failed, returned = source.engine.poll(5.0)
    assert isinstance(failed, Failed)
    assert (failed.transfer, failed.reason, failed.next) == (left, Reason.LEASE_RECLAIMED, NextStep.RECOMPUTE)
    assert returned == BlocksReturned(left)
    late = destination.engine.pull(left.grant, content(PROMPT))
    late.start(TARGET)
    assert failure(destination.finish(late)).reason is Reason.LEASE_RECLAIMED
    pull = destination.engine.pull(wanted.grant, content(PROMPT))
    pull.start(TARGET)
    destination.finish(pull)
    assert source.finish(wanted) == [BlocksReturned(wanted)]


def test_a_lead_that_hangs_is_waited_for_as_said_and_asked_again_once_it_has_answered(
    leads: Leads, attach: Attach
) -> None:
    side = attach(leads[0])
    left = [side.hand_over(ids, PROMPT, firm_ttl_s=0.0) for ids in (SOURCE, [11, 12, 13])]
    side.engine.poll()
    with leads[0].process.stopped():
        for said in ("within 0.1 s", "an earlier call"):
            with pytest.raises(DeadlineExceeded, match=said):
                side.engine.reclaim(2, timeout_s=0.1)
    assert side.finish(left[0])[-1] == BlocksReturned(left[0])
    assert side.engine.reclaim(2, timeout_s=5.0).leases[0].lease_id == left[1].lease_id


def test_what_is_firm_stays_and_the_answer_says_until_when(pair: tuple[Side, Side]) -> None:
    source, _ = pair
    source.hand_over(SOURCE, PROMPT, firm_ttl_s=100.0)
    answer = source.engine.reclaim(1)
    assert not answer.enough
    (later,) = answer.later
    assert 50 < later.in_s <= 100
    assert later.block_counts == (3,)


def test_a_push_that_nobody_came_for_comes_back(pair: tuple[Side, Side]) -> None:
    source, _ = pair
    push = source.engine.push(content(PROMPT), transfer_key=b"k" * 16, firm_ttl_s=0.0)
    push.finished(SOURCE[:2])
    assert not source.engine.reclaim(1).enough
    push.finished(SOURCE[2:], last=True)
    assert source.engine.reclaim(3).enough
    source.poll_until(lambda events: BlocksReturned(push) in events)


def test_an_engine_gets_back_blocks_that_it_has_allocated(leads: Leads, attach: Attach) -> None:
    source = attach(leads[0], kind=PoolKind.SERVER_MANAGED)
    ids = source.engine.allocate(3)
    made = source.hand_over(ids, PROMPT, firm_ttl_s=0.0)
    assert source.engine.reclaim(3).enough
    assert BlocksReturned(made) in source.finish(made)
    source.engine.free(ids)


def test_bad_counts_are_refused(pair: tuple[Side, Side]) -> None:
    source, _ = pair
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        source.engine.reclaim(0)
    with refused(Reason.LIMIT_EXCEEDED, OutOfRange):
        source.engine.reclaim(BLOCKS + 1)
    with refused(Reason.GROUP_MISMATCH, InvalidRequest):
        source.engine.reclaim(1, group=7)


@pytest.mark.parametrize("firm_ttl_s", [-1.0, float("nan")])
def test_a_bad_firm_time_is_refused_before_anything_is_minted(pair: tuple[Side, Side], firm_ttl_s: float) -> None:
    source, _ = pair
    with refused(Reason.TTL_INVALID, InvalidRequest):
        source.hand_over(SOURCE, PROMPT, firm_ttl_s=firm_ttl_s)
    with refused(Reason.TTL_INVALID, InvalidRequest):
        source.engine.push(content(PROMPT), transfer_key=b"k" * 16, firm_ttl_s=firm_ttl_s)
