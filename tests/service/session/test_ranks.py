"""Requests of a lead to its ranks."""

from typing import Any

import pytest

from kvgrpc.core.actions import Expect, Operation
from kvgrpc.service.session.ranks import Ranks


class Asked:
    """A rank that records what it is told to expect."""

    def __init__(self) -> None:
        self.expected: list[tuple[str, bool, Operation]] = []

    def expect(self, access: str, open_: bool, operation: Operation) -> None:
        self.expected.append((access, open_, operation))


@pytest.mark.parametrize(
    ("paths", "writes", "told"),
    [(("cma",), False, False), (("cma", "nixl"), False, True), ((), False, True), (("cma",), True, True)],
    ids=["reads by itself", "one rank needs help", "not known", "writes"],
)
def test_ranks_expect_a_read_only_where_it_needs_their_help(paths: tuple[str, ...], writes: bool, told: bool) -> None:
    rank: Any = Asked()
    ranks = Ranks(unaided=frozenset({"shm", "cma"}))
    ranks.ranks = {0: rank}
    for open_ in (True, False):
        ranks.expect(Expect("a", open_, writes, paths))
    operation = Operation.WRITE if writes else Operation.READ
    assert rank.expected == ([("a", True, operation), ("a", False, operation)] if told else [])
