"""Block ids belong to one life of an engine: after a restart, the same ids name other blocks."""

from collections.abc import Callable

import pytest

from kvgrpc.v1 import handoff_pb2, lease_pb2, pool_pb2
from tests.service.api import refused
from tests.service.conftest import Start
from tests.service.engines import Engine, unchanged
from tests.service.values import content, group, named_blocks, new_key, prompt

TOKENS = prompt(32)


@pytest.fixture
def lives(start: Start) -> tuple[Engine, int, list[int]]:
    """Returns a restarted engine, its earlier life, and block ids of that life that were given out again."""
    (old,) = start(())
    life, mine = old.incarnation(), old.allocate(2)
    old.process.kill()
    (engine,) = start(("--listen", old.address, "--engine-id", old.engine_id))
    assert engine.allocate(2) == mine, "the ids are those of somebody else now"
    return engine, life, mine


def test_block_ids_of_the_life_before_a_restart_touch_nothing_of_this_one(lives: tuple[Engine, int, list[int]]) -> None:
    engine, life, mine = lives
    grant = engine.hand_over(TOKENS).grant
    destination = engine.into(mine)
    destination.blocks.incarnation = life
    named = named_blocks(life, group(mine))
    made = content(TOKENS)
    calls: list[Callable[[], object]] = [
        lambda: engine.hand_over(TOKENS, mine, incarnation=life),
        lambda: engine.api.handoff.PullBlocks(
            handoff_pb2.PullBlocksRequest(grant=grant, content=made, destination=destination)
        ),
        lambda: engine.api.leases.GrantLease(
            lease_pb2.GrantLeaseRequest(blocks=named, content=made, transfer_key=new_key())
        ),
        lambda: engine.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(blocks=named)),
        lambda: engine.api.pool.ReadBlocks(pool_pb2.ReadBlocksRequest(blocks=named)),
    ]
    for call in calls:
        with unchanged(engine), refused(engine.api, "ABORTED", "INCARNATION_CHANGED"):
            call()


def test_block_ids_of_this_life_are_taken_with_and_without_its_number(source: Engine) -> None:
    mine = source.allocate(2)
    life = source.incarnation()
    assert source.hand_over(TOKENS, mine, incarnation=life).lease.lease_id
    assert source.hand_over(TOKENS, mine).lease.lease_id
