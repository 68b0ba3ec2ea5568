"""Blocks that an attached engine allocated: no other caller uses them by their numbers or by their allocation's id."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvgrpc.core.values.layout import PoolKind
from tests.engine.conftest import Leads
from tests.engine.owners.victims import (
    GUESSING,
    NAMING_AN_ALLOCATION,
    NAMING_BLOCKS,
    OF_THE_POOL,
    PASSED_OVER,
    REASONS,
    Victim,
    attached,
    refusal,
)


@pytest.fixture(scope="module")
def managed(leads: Leads) -> Iterator[Victim]:
    """Yields an engine whose server gives out the blocks of its pool."""
    yield from attached(leads, PoolKind.SERVER_MANAGED)


@pytest.mark.parametrize("name", NAMING_BLOCKS)
def test_blocks_that_an_engine_allocated_are_used_by_no_other_caller_that_knows_their_numbers(
    managed: Victim, name: str
) -> None:
    found = refusal(managed, NAMING_BLOCKS[name])
    assert found.reason == REASONS.get(name, "BLOCK_NOT_ALLOCATED")


@pytest.mark.parametrize("name", NAMING_AN_ALLOCATION)
def test_an_allocation_of_an_engine_is_used_by_no_other_caller_that_knows_its_id(managed: Victim, name: str) -> None:
    found = refusal(managed, NAMING_AN_ALLOCATION[name])
    assert found.reason == "BLOCK_NOT_ALLOCATED"


@pytest.mark.parametrize("name", NAMING_AN_ALLOCATION)
def test_a_refusal_does_not_say_whether_an_allocation_exists(managed: Victim, name: str) -> None:
    other = replace(managed, allocation_id=managed.allocation_id[:-4] + "0000")
    here, nowhere = (refusal(victim, NAMING_AN_ALLOCATION[name]) for victim in (managed, other))
    assert replace(here, message="", metadata={}) == replace(nowhere, message="", metadata={})
    assert here.message.replace(managed.allocation_id, "") == nowhere.message.replace(other.allocation_id, "")


@pytest.mark.parametrize("name", OF_THE_POOL)
def test_blocks_of_an_engine_are_freed_by_no_other_caller(managed: Victim, name: str) -> None:
    assert refusal(managed, OF_THE_POOL[name]).reason == "BLOCK_NOT_ALLOCATED"


@pytest.mark.parametrize("name", GUESSING)
def test_ids_of_leases_and_transfers_are_not_guessed(managed: Victim, name: str) -> None:
    assert refusal(managed, GUESSING[name]).code == "NOT_FOUND"


@pytest.mark.parametrize("name", PASSED_OVER)
def test_of_several_names_those_of_another_caller_are_passed_over(managed: Victim, name: str) -> None:
    before = managed.state()
    PASSED_OVER[name](managed)
    assert managed.state() == before
