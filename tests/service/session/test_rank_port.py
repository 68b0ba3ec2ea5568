"""Requests of a lead to its ranks."""

import pytest

from kvgrpc.core.actions import AwaitEnd, Expect, MakeOffer, RankAction, UnmapPeer
from kvgrpc.service.runner import Ranks


class Asked:
    """A rank that records its commands."""

    def __init__(self) -> None:
        self.commands: list[RankAction] = []

    def perform(self, action: RankAction) -> None:
        self.commands.append(action)


@pytest.mark.parametrize(
    ("paths", "writes", "told"),
    [(("cma",), False, False), (("cma", "nixl"), False, True), ((), False, True), (("cma",), True, True)],
    ids=["reads by itself", "one rank needs help", "not known", "writes"],
)
def test_ranks_expect_a_read_only_where_it_needs_their_help(paths: tuple[str, ...], writes: bool, told: bool) -> None:
    rank = Asked()
    ranks = Ranks(unaided=frozenset({"shm", "cma"}))
    ranks.ranks = {0: rank}
    expected = [Expect("a", open_, writes, paths) for open_ in (True, False)]
    for action in expected:
        ranks.perform(action)
    assert rank.commands == (expected if told else [])


def test_an_end_of_a_peer_is_nothing_to_a_rank_that_is_gone() -> None:
    ranks = Ranks(unaided=frozenset())
    for action in (UnmapPeer(0, "p"), AwaitEnd(0, "p")):
        ranks.perform(action)
    with pytest.raises(KeyError):
        ranks.perform(MakeOffer(0, "key", "p"))
