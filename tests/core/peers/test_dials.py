"""Handshakes that callers cause by naming addresses are bounded, and are refused before anything happens."""

from collections.abc import Callable

import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import Dial, MakeOffer, PeerConnected
from kvgrpc.core.events import DialFailed, EndpointOffered, Event
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Exhausted, Reason, Unavailable
from tests.core.nodes import Lead, access_id, content, describe, endpoint, grant, lists, refused, snapshot

EACH, ALL, WHILE_S = 3, 5, 10.0
Ask = Callable[[Call], Event]


@pytest.fixture
def lead() -> Lead:
    limits = Limits(dials_per_connection=EACH, dials=ALL, connect_timeout_s=WHILE_S)
    return Lead(describe("d", 2), limits)


def connect(lead: Lead, address: str, connection: str = "a") -> int:
    return lead.ask(lambda c: events.ConnectPeer(c, address, ""), connection=connection)


def pulls(call: Call) -> Event:
    token = grant(describe("new", 1))
    return events.PullBlocks(call, token, access_id=access_id(1), content=content(32))


def registers(call: Call) -> Event:
    token = grant(describe("new", 1), access=AccessKind.WRITE)
    return events.RegisterPush(call, token, "", access_id(1), access_id(2))


def reserves(call: Call) -> Event:
    source = events.PushSource("new:1")
    return events.ReserveBlocks(call, b"k" * 16, lists((0, 1)), content(32), source=source)


NAMES = ("connects", "pulls", "registers", "reserves")
KINDS = pytest.mark.parametrize(
    "ask", [lambda call: events.ConnectPeer(call, "new:1", ""), pulls, registers, reserves], ids=NAMES
)


@KINDS
def test_a_connection_causes_so_many_handshakes_in_a_while_and_one_more_is_refused(lead: Lead, ask: Ask) -> None:
    for number in range(EACH):
        connect(lead, f"silent-{number}:1")
    before = snapshot(lead.node)
    with pytest.raises(Exhausted) as caught:
        lead.answer(lead.ask(ask, connection="a"))
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    assert "come back later" in caught.value.message
    assert caught.value.retry_delay_s == WHILE_S
    assert snapshot(lead.node) == before
    lead.ask(ask, connection="b")
    assert lead.seen(MakeOffer)
    assert len(lead.node.state.peers.dials) == EACH + 1


@KINDS
def test_all_callers_together_cause_so_many_and_the_engine_itself_is_not_held_back(lead: Lead, ask: Ask) -> None:
    for number in range(ALL):
        connect(lead, f"silent-{number}:1", f"caller-{number}")
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        lead.answer(lead.ask(ask, connection="another"))
    lead.ask(ask)
    assert lead.seen(MakeOffer)


def test_handshakes_that_fail_at_once_count_for_the_same_while(lead: Lead) -> None:
    for number in range(EACH):
        connect(lead, f"closed-{number}:1")
        lead.feed(DialFailed(f"closed-{number}:1", Unavailable(Reason.PEER_UNREACHABLE, "connection refused")))
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        lead.answer(connect(lead, "other:1"))
    lead.tick(WHILE_S)
    assert lead.answer(connect(lead, "other:1")) is None


def test_an_address_that_is_being_dialled_or_is_connected_takes_no_room(lead: Lead) -> None:
    peer = describe("p", 1)
    connect(lead, peer.address)
    lead.connect(peer)
    for number in range(EACH - 1):
        connect(lead, f"silent-{number}:1")
    assert isinstance(lead.answer(connect(lead, peer.address)), PeerConnected)
    assert lead.answer(connect(lead, "silent-0:1")) is None
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        lead.answer(connect(lead, "silent-9:1"))


def test_nothing_is_kept_of_callers_that_are_gone_and_others_go_on_waiting(lead: Lead) -> None:
    waits = connect(lead, "p:1", "b")
    offer = lead.one(MakeOffer)
    for _ in range(100):
        gone = connect(lead, "p:1")
        lead.feed(events.CallAbandoned(gone))
        with refused(Reason.DEADLINE):
            lead.answer(gone)
    (dial,) = lead.node.state.peers.dials.values()
    assert list(dial.calls) == [waits]
    assert any(isinstance(action, Dial) for action in lead.feed(EndpointOffered(0, offer.key, endpoint(0))))


def test_a_caller_that_leaves_ends_its_own_wait_and_no_other_address_s(lead: Lead) -> None:
    stays, leaves = connect(lead, "p:1"), connect(lead, "q:1")
    lead.feed(events.CallAbandoned(leaves))
    with refused(Reason.DEADLINE):
        lead.answer(leaves)
    assert [list(dial.calls) for dial in lead.node.state.peers.dials.values()] == [[stays], []]
    lead.feed(events.CallAbandoned(leaves))
    assert [list(dial.calls) for dial in lead.node.state.peers.dials.values()] == [[stays], []]


def test_connections_without_recent_handshakes_are_forgotten(lead: Lead) -> None:
    for number in range(100):
        connect(lead, f"silent-{number}:1", f"caller-{number}")
    budget = lead.state.peers.dial_budget
    assert budget.left() == {"begun": ALL, "counts": ALL}
    lead.tick(WHILE_S)
    connect(lead, "late:1", "late")
    assert budget.left() == {"begun": 1, "counts": 1}
