"""A push between two leads, from reservation to end, whichever side moves the bytes."""

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import Operation
from kvgrpc.core.tables.transfers import Disposition, State
from tests.core.nodes import access_id, key_of
from tests.core.pairs import MODES, Pair, Writers


def succeeded(pair: Pair) -> None:
    for transfer in pair.both():
        assert transfer.state is State.SUCCEEDED, transfer
        assert transfer.memory is Disposition.RETURNED
    for lead in (pair.p, pair.d):
        assert not len(lead.state.pool.pins)
    assert [type(news) for news in pair.told["d"]][-1] is actions.ReceivedNews
    assert [type(news) for news in pair.told["p"]] == [actions.BlocksReturnedNews]


@MODES
@pytest.mark.parametrize("first", ["registration", "part"])
def test_a_whole_prompt_lands_whatever_comes_first(writers: Writers, first: str) -> None:
    pair = Pair(writers)
    token = pair.reserve(40, range(10, 13)).token
    if first == "part":
        pair.finish(40, (5, 6, 7))
        pair.register(token)
    else:
        pair.register(token)
        pair.finish(40, (5, 6, 7))
    ((lead, post),) = pair.posts
    assert lead is (pair.p if writers else pair.d)
    assert post.operation is (Operation.WRITE if writers else Operation.READ)
    assert (post.runs.src.tolist(), post.runs.dst.tolist()) == ([40, 552], [80, 592])
    assert [t.state for t in pair.both()] == [State.ACTIVE, State.ACTIVE]
    pair.moved()
    succeeded(pair)


@MODES
def test_only_what_the_destination_lacks_is_moved(writers: Writers) -> None:
    pair = Pair(writers)
    token = pair.reserve(40, (30,), have_tokens=32).token
    pair.register(token)
    pair.finish(40, (5, 6, 7))
    ((_, post),) = pair.posts
    assert (post.runs.src.tolist(), post.runs.dst.tolist()) == ([56, 568], [240, 752])
    pair.moved()
    succeeded(pair)


@MODES
def test_chunks_move_as_they_come_and_end_with_the_last(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(64, range(4)).token)
    pair.finish(64, (9,), last=False)
    pair.finish(64, (8,), last=False, content=None)
    assert len(pair.posts) == 1
    pair.moved()
    assert len(pair.posts) == 1
    pair.moved()
    assert not pair.posts
    assert [t.state for t in pair.both()] == [State.ACTIVE, State.ACTIVE]
    pair.finish(64, (7, 6), last=True)
    pair.moved()
    succeeded(pair)


@MODES
def test_layers_are_usable_as_soon_as_all_their_blocks_are_there(writers: Writers) -> None:
    pair = Pair(writers)
    pair.register(pair.reserve(32, range(2)).token)
    pair.finish(32, (9, 8), last=False, layers=(0, 1))
    pair.moved()
    assert pair.both()[1].layers_done == ((0, 1),)
    assert pair.both()[1].has_layers(0, 1)
    assert not pair.both()[1].has_layers(0, 2)
    assert [news for news in pair.told["d"] if isinstance(news, actions.LayersReceivedNews)] == [
        actions.LayersReceivedNews(pair.both()[1].id, "", ((0, 1),), 0)
    ]
    pair.finish(32, (9, 8), last=True, layers=(1, 1))
    pair.moved()
    succeeded(pair)
    assert pair.both()[1].has_layers(0, 2)


@MODES
def test_the_destinations_lead_registers_by_itself_where_it_knows_the_source(writers: Writers) -> None:
    pair = Pair(writers)
    pair.reserve(32, source=events.PushSource("p:1", "p"))
    pair.finish(32)
    pair.moved()
    succeeded(pair)


def test_a_sources_ranks_hear_how_a_destination_reads_and_the_next_push_begins_with_it() -> None:
    pair = Pair()

    def heard(number: int) -> list[tuple[bool, tuple[str, ...]]]:
        access = f"a-{access_id(number).hex()}"
        found = [action for action in pair.sent if isinstance(action, actions.Expect) and action.access == access]
        return [(action.open, action.paths) for action in found]

    read_accesses, path = (31, 33), ("loopback",)
    for number in range(len(read_accesses)):
        key = bytes([number]) * 16
        pair.reserve(32, source=events.PushSource("p:1", "p"), key=key)
        pair.finish(32, key=key)
        pair.moved()
    assert heard(read_accesses[0]) == [(True, ()), (False, ()), (True, path), (False, path)]
    assert heard(read_accesses[1]) == [(True, path), (False, path)]


def test_a_destination_that_does_not_reach_every_rank_does_not_say_how_it_reads() -> None:
    pair = Pair()
    pair.register(pair.reserve(32).token)
    pair.d.node.state.peers.lives[key_of(pair.p.me)].paths.clear()
    pair.finish(32)
    assert pair.p.node.state.peers.lives[key_of(pair.d.me)].reads_by == ()
