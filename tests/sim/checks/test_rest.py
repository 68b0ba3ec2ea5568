"""Unit tests of `Rest`, which decides when a write is over because its writer said so."""

from collections.abc import Callable

import pytest

from kvgrpc.core.actions import Expect
from kvgrpc.core.events import (
    AccessClosing,
    AccessSettling,
    Call,
    CloseAccess,
    CloseOutcome,
    OpenAccess,
    ProcessEnded,
    Rekeyed,
    SettleAccess,
)
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import Access, AccessOpening
from kvgrpc.core.tables.transfers import Direction, Disposition, State, Transfer
from kvgrpc.core.values import grants
from kvgrpc.core.values.content import chain
from sim import Violated
from sim.checks.rest import Rest, Word
from sim.checks.writers import WriterAudit
from tests.core.nodes import Lead, describe

ACCESS, LATER = b"a" * 16, b"b" * 16
NAME, LATER_NAME = f"w-{ACCESS.hex()}", f"w-{LATER.hex()}"
TOKEN = b"token"
P, OTHER = 1, 2
"""Two lives of the engine that pushes."""
CALL = Call(1, "peer")
RETURNED = Transfer("t", Direction.RECEIVE, 0.0, b"", "", state=State.FAILED, memory=Disposition.RETURNED)


def opens(access_id: bytes, life: int = P, reverse: bytes = b"") -> OpenAccess:
    opening = AccessOpening(access_id, TOKEN, None, reverse_access_id=reverse, push_content=chain((1,)))
    return OpenAccess(CALL, "p", life, (opening,))


def settles(life: int, access_id: bytes = ACCESS, *, last: bool = True) -> SettleAccess:
    return SettleAccess(CALL, "p", life, (AccessSettling(access_id, last),))


def closes(life: int, access_id: bytes = ACCESS, token: bytes = b"", *, quiesced: bool = True) -> CloseAccess:
    return CloseAccess(CALL, "p", life, (AccessClosing(access_id, CloseOutcome.DROPPED, quiesced, token),))


def written() -> Rest:
    rest = Rest()
    rest.hears(opens(ACCESS), {})
    rest.expects(NAME)
    rest.granted(ACCESS, "t")
    return rest


def never(_: str) -> bool:
    return False


@pytest.mark.parametrize(
    "word",
    [
        settles(P),
        closes(P),
        closes(P, b"x" * 16, TOKEN),
        opens(LATER),
        opens(LATER, reverse=b"r" * 16),
    ],
    ids=["settles the last", "closes", "gives up its grant", "starts over", "starts over and lets read"],
)
def test_a_write_is_over_when_the_life_that_writes_says_so(word: Word) -> None:
    rest = written()
    rest.hears(word, {})
    rest.believed(NAME, proved=never)
    rest.returned("t")


@pytest.mark.parametrize(
    "word",
    [
        settles(OTHER),
        closes(OTHER),
        closes(OTHER, b"x" * 16, TOKEN),
        opens(LATER, OTHER),
        settles(P, last=False),
        closes(P, quiesced=False),
        settles(P, LATER),
        opens(ACCESS),
        opens(ACCESS, OTHER),
    ],
    ids=[
        "another life settles", "another life closes", "another life gives up its grant", "another life starts over",
        "not the last", "not at rest", "another access", "the same again", "another life asks for the same",
    ],
)  # fmt: skip
def test_a_write_is_not_over_by_any_other_word(word: Word) -> None:
    rest = written()
    rest.hears(word, {})
    with pytest.raises(Violated, match=f"p@0000000000000001 may write under {NAME}, and has not said that it does not"):
        rest.believed(NAME, proved=never)


def test_closing_a_waiting_opening_counts_for_what_its_peer_opened_before() -> None:
    rest = written()
    waiting = Access(opens(LATER).openings[0], "p", "p@0000000000000001", "l", 0.0, kind=grants.AccessKind.WRITE)
    rest.hears(closes(P, LATER), {LATER: waiting})
    rest.believed(NAME, proved=never)


def test_of_two_openings_that_wait_the_later_one_says_it_of_the_first() -> None:
    rest = Rest()
    for access_id in (ACCESS, LATER):
        rest.hears(opens(access_id), {})
    rest.expects(NAME)
    rest.believed(NAME, proved=never)
    rest.expects(LATER_NAME)
    with pytest.raises(Violated):
        rest.believed(LATER_NAME, proved=never)


def test_an_access_is_of_the_life_that_opened_it_while_it_is_known() -> None:
    rest = written()
    known = {
        ACCESS: Access(opens(ACCESS).openings[0], "p", "p@0000000000000001", "l", 0.0, kind=grants.AccessKind.WRITE)
    }
    rest.hears(opens(ACCESS, OTHER), known)
    rest.hears(settles(OTHER), known)
    with pytest.raises(Violated):
        rest.believed(NAME, proved=never)


def test_blocks_come_back_only_when_no_write_is_expected() -> None:
    rest = written()
    rest.hears(settles(P), {})
    with pytest.raises(Violated, match="the blocks of t are free, and p@0000000000000001 may write"):
        rest.returned("t")


# -- other proofs


def lead_that_expects() -> tuple[WriterAudit, NodeState]:
    lead = Lead()
    lead.admit(describe("p"))
    proven, state = WriterAudit(), lead.state
    proven.hears(opens(ACCESS), state)
    proven.expects(Expect(NAME, open=True, writes=True))
    proven.granted(ACCESS, "t", "p@0000000000000001")
    return proven, state


@pytest.mark.parametrize(
    ("event", "good"),
    [
        (ProcessEnded(0, "p@0000000000000001", drained=True), True),
        (ProcessEnded(0, "p@0000000000000001", drained=False), False),
        (ProcessEnded(0, "p@0000000000000002", drained=True), False),
        (Rekeyed(0), True),
    ],
)
def test_what_proves_it_without_a_word(event: ProcessEnded | Rekeyed, good: bool) -> None:
    proven, state = lead_that_expects()
    proven.hears(event, state)
    over: Callable[[], None] = lambda: proven.expects(Expect(NAME, open=False, writes=True))
    if not good:
        with pytest.raises(Violated):
            over()
        return
    over()
    proven.changed(RETURNED)


def test_what_failed_may_be_held_back_as_long_as_a_peer_may_write() -> None:
    proven, _ = lead_that_expects()
    proven.changed(Transfer("t", Direction.RECEIVE, 0.0, b"", "", memory=Disposition.QUARANTINED))
    with pytest.raises(Violated, match="the blocks of t are free"):
        proven.changed(RETURNED)
