"""Lives of other engines: which state may follow which, and when a life can be used."""

from dataclasses import replace

import pytest

from kvgrpc.core.tables.peers import STATES, Peer, PeerState
from kvgrpc.core.tables.transfers import RankPath
from kvgrpc.core.values.bridge import bridges
from kvgrpc.core.values.compatibility import side_of
from tests.core.nodes import check_table, describe, endpoints

TWO_RANKS = describe("q", 0xAB, world_size=2)
BRIDGES = bridges(side_of(TWO_RANKS), side_of(TWO_RANKS))


def path(rank: int, data_path: str = "shm") -> RankPath:
    return RankPath(rank, rank, data_path, "why")


def peer(state: PeerState = PeerState.CONNECTED, *paths: RankPath) -> Peer:
    made = Peer(TWO_RANKS, endpoints(TWO_RANKS), BRIDGES, heard=10.0, state=state)
    made.paths = {(p.rank, p.peer_rank): p for p in paths}
    return made


def test_every_move_of_the_table_happens_and_no_other() -> None:
    def move(before: PeerState, after: PeerState) -> PeerState:
        made = peer(before)
        made.move(after)
        return made.state

    check_table(STATES, move)


@pytest.mark.parametrize("state", PeerState)
def test_staying_is_no_move_and_a_refused_one_changes_nothing(state: PeerState) -> None:
    made = peer(state)
    made.move(state)
    for after in set(PeerState) - STATES[state] - {state}:
        with pytest.raises(AssertionError):
            made.move(after)
    assert made.state is state


def test_a_dead_peer_stays_dead() -> None:
    assert STATES[PeerState.DEAD] == frozenset()
    assert all(PeerState.DEAD in after for state, after in STATES.items() if state is not PeerState.DEAD)


def test_a_life_has_a_key_of_its_own() -> None:
    assert peer().key == "q@00000000000000ab"
    assert Peer(replace(TWO_RANKS, incarnation=1), (), BRIDGES, 0.0).key != peer().key


@pytest.mark.parametrize(
    ("paths", "reachable"),
    [
        ((), False),
        ((path(0),), False),
        ((path(0), path(1, "")), False),
        ((path(0), path(1, "nixl")), True),
    ],
)
def test_a_peer_is_reachable_when_every_rank_reaches_its_memory(paths: tuple[RankPath, ...], reachable: bool) -> None:
    assert peer(PeerState.CONNECTED, *paths).reachable is reachable
    assert peer(PeerState.CONNECTED, *paths).usable is reachable


@pytest.mark.parametrize("state", PeerState)
def test_only_a_connected_peer_that_knows_us_is_usable(state: PeerState) -> None:
    made = peer(state, path(0), path(1))
    assert made.usable is (state is PeerState.CONNECTED)
    made.forgotten = True
    assert not made.usable


def test_a_peer_is_at_the_address_that_was_dialled_or_at_the_one_that_it_states() -> None:
    made = peer()
    assert made.address == TWO_RANKS.address
    made.dialled = "10.0.0.9:5"
    assert made.address == "10.0.0.9:5"
