"""The minimal engine's blocks are found by their content until they are recycled."""

from collections import Counter

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine as StateMachine, consumes, invariant, multiple, rule

from examples.minimal_engine.paged import BlockManager, OutOfBlocks


def test_a_prompt_that_is_cached_as_a_whole_still_computes_its_last_block() -> None:
    manager = BlockManager(8, 4)
    table, _ = manager.allocate(range(8))
    manager.register(table, range(8))
    again = manager.allocate(range(8))
    assert again.cached_tokens == 4
    assert again.block_table[0] == table[0]
    assert again.block_table[1] != table[1]


def test_what_is_forgotten_is_not_found_but_what_is_used_is() -> None:
    manager = BlockManager(8, 2)
    used, freed = ([1, 1, 1], [2, 2, 2])
    for prompt in (used, freed):
        table, _ = manager.allocate(prompt)
        manager.register(table, prompt)
        if prompt is freed:
            manager.release(table)
    manager.forget()
    manager.check_integrity()
    assert manager.allocate(freed).cached_tokens == 0
    assert manager.allocate(used).cached_tokens == 2


def test_freed_blocks_are_found_until_they_are_recycled_oldest_and_table_end_first() -> None:
    manager = BlockManager(5, 2)
    prompts = ([1, 1, 1, 1, 1], [2, 2, 2])
    older, newer = [manager.allocate(prompt).block_table for prompt in prompts]
    for table, prompt in zip((older, newer), prompts, strict=True):
        manager.register(table, prompt)
        manager.release(table)
    # The two blocks that are not full are recycled before any that a prompt may find.
    assert sorted(manager.allocate([3, 3, 3]).block_table) == sorted([older[2], newer[1]])
    assert manager.allocate([4]).block_table == [older[1]]
    assert manager.allocate([1, 1, 1, 1]).block_table == [older[0], newer[0]]


def test_a_refused_call_changes_nothing() -> None:
    manager = BlockManager(3, 2)
    table, _ = manager.allocate([1, 1, 1])
    manager.register(table, [1, 1])
    for refused in (
        lambda: manager.allocate([1, 1, 5, 5, 5]),
        lambda: manager.extend(table, 9),
        lambda: manager.register(table, [2, 2]),
        lambda: manager.register(table[:1], [1, 1, 1, 1]),
        lambda: manager.release([table[0], table[0]]),
        lambda: manager.release([3]),
        lambda: manager.hold([2]),
        lambda: manager.allocate([]),
    ):
        with pytest.raises((OutOfBlocks, ValueError)):
            refused()
        manager.check_integrity()
        assert (manager.used_blocks, manager.free_blocks, len(table)) == (2, 1, 2)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class BlockStory(StateMachine):
    """Requests and transfers in any order, compared with what each block really holds.

    Few tokens make prompts share prefixes; few blocks make them be recycled.
    """

    owners = Bundle("owners")  # block lists of requests and transfers, with one reference each

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12, 2)
        self.references: Counter[int] = Counter()
        self.content: dict[int, tuple[int, ...]] = {}  # all tokens up to the block's end

    @rule(target=owners, prompt=PROMPTS, register=st.booleans())
    def request(self, prompt: list[int], register: bool) -> object:
        free = self.manager.free_blocks
        try:
            table, cached_tokens = self.manager.allocate(prompt)
        except OutOfBlocks:
            assert free < -(-len(prompt) // 2)
            return multiple()
        assert len(table) == len(set(table)) == -(-len(prompt) // 2)
        assert cached_tokens in range(0, len(prompt), 2)
        for n, block in enumerate(table):
            tokens = tuple(prompt[: 2 * n + 2])
            if 2 * n < cached_tokens:
                assert self.content[block] == tokens
            else:
                assert not self.references[block]
                self.content[block] = tokens
        self.references.update(table)
        if register:
            self.manager.register(table, prompt)
        return table

    @rule(target=owners, blocks=owners)
    def hand_over(self, blocks: list[int]) -> list[int]:
        self.manager.hold(blocks)
        self.references.update(blocks)
        return list(blocks)

    @rule(blocks=consumes(owners))
    def end(self, blocks: list[int]) -> None:
        self.manager.release(blocks)
        self.references.subtract(blocks)

    @invariant()
    def each_block_is_free_or_used_and_has_the_references_of_its_owners(self) -> None:
        self.manager.check_integrity()
        used = {block for block, count in self.references.items() if count}
        assert self.manager.used_blocks == len(used)
        assert self.manager.free_blocks + len(used) == 12
        assert all(self.manager._references[block] == n for block, n in self.references.items())


TestBlockStory = BlockStory.TestCase
TestBlockStory.settings = settings(max_examples=60, stateful_step_count=30)
