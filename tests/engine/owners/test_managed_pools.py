"""The pool of an engine whose own block manager gives out the blocks: only the engine may name them."""

from collections.abc import Iterator

import pytest

from kvgrpc.core.values.layout import PoolKind
from tests.engine.conftest import Leads
from tests.engine.owners.victims import NAMING_BLOCKS, REASONS, SCHEDULING, Victim, attached, refusal


@pytest.fixture(scope="module")
def managing(leads: Leads) -> Iterator[Victim]:
    """Yields an engine that manages its pool itself."""
    yield from attached(leads, PoolKind.ENGINE_MANAGED)


@pytest.mark.parametrize("name", NAMING_BLOCKS)
def test_no_caller_but_the_engine_names_blocks_that_its_own_block_manager_gives_out(
    managing: Victim, name: str
) -> None:
    assert refusal(managing, NAMING_BLOCKS[name]).reason == REASONS.get(name, "NOT_OWNER")


@pytest.mark.parametrize("name", SCHEDULING)
def test_an_attached_engine_alone_is_scheduled_by_who_shows_its_ticket(managing: Victim, name: str) -> None:
    assert refusal(managing, SCHEDULING[name]).reason == "NOT_OWNER"
