"""Asking ranks of a peer to send: under which access a rank asks, and how it is answered."""

from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.values.sends import MEET, SendAnswer, SendAsk
from tests.core.nodes import Lead, access_id, answer_of, describe, endpoints, grant, ids, key_of
from tests.core.pairs import Pair

P = describe("p", 1)
LIFE = key_of(P)
ASK = SendAsk(0, 0, 1, 1, ids(8), ids(16))
MEETING = SendAsk(0, 0, 1, MEET, values=(("address", b"here"),))


@pytest.fixture
def lead() -> Lead:
    """Makes a lead that is connected to P."""
    made = Lead(describe("d", 2))
    made.admit(P)
    return made


def pulls(lead: Lead, number: int = 1) -> str:
    """Starts a pull from P, and returns its posting id."""
    lead.pull(grant(P), 32, (4, 5), number=number)
    lead.connect(P)
    lead.feed(events.AccessAnswered(access_id(number), answer_of(P)))
    return lead.one(actions.Post).posting_id


def told(lead: Lead, answer: SendAnswer) -> None:
    """Asserts that the rank gets that answer, and that no peer is asked."""
    assert lead.done == [actions.AnswerSend(0, LIFE, answer)]


OVER = SendAnswer(0, 1, 1, error="the transfer is over")


def test_the_source_is_asked_to_send_under_the_access_of_the_posting(lead: Lead) -> None:
    posting = pulls(lead)
    lead.feed(events.SendWanted(0, LIFE, posting, ASK))
    sent = lead.one(actions.SendPostSend)
    assert (sent.peer, sent.rank, sent.access_id, sent.ask) == (LIFE, 0, access_id(), ASK)


def test_ranks_meet_while_nothing_moves(lead: Lead) -> None:
    lead.feed(events.SendWanted(0, LIFE, "", MEETING))
    assert lead.one(actions.SendPostSend).access_id == b""
    posting = pulls(lead)
    lead.feed(events.SendWanted(0, LIFE, posting, MEETING))
    assert lead.one(actions.SendPostSend).ask is MEETING
    lead.feed(events.SendWanted(0, LIFE, "forgotten", MEETING))
    assert lead.one(actions.SendPostSend).access_id == b""


@pytest.mark.parametrize(
    "answer",
    [
        SendAnswer(0, 1, 1),
        SendAnswer(0, 1, MEET, values=(("store", b"there"),)),
        SendAnswer(0, 1, 1, error="it broke"),
        SendAnswer(0, 1, 1, error="no answer", known=False),
    ],
)
def test_a_rank_is_told_what_came_of_it(lead: Lead, answer: SendAnswer) -> None:
    lead.feed(events.PostSendAnswered(0, LIFE, answer))
    told(lead, answer)


def test_an_answer_ends_no_posting(lead: Lead) -> None:
    posting = pulls(lead)
    lead.feed(events.SendWanted(0, LIFE, posting, ASK))
    lead.feed(events.PostSendAnswered(0, LIFE, SendAnswer(0, 1, 1)))
    assert lead.state.moves.of_posting(posting) is not None
    lead.feed(events.PostSendAnswered(0, LIFE, SendAnswer(0, 1, 1, error="no answer", known=False)))
    assert lead.state.moves.of_posting(posting) is not None, "the rank says when it accesses memory no more"
    lead.feed(events.PostingEnded(posting, True, 32))
    assert lead.one(actions.SendSettle)


def test_nothing_is_asked_for_a_posting_of_no_transfer_or_of_another_peer(lead: Lead) -> None:
    posting = pulls(lead)
    other = describe("q", 9)
    lead.admit(other)
    lead.feed(events.SendWanted(0, LIFE, "forgotten", ASK))
    told(lead, OVER)
    lead.feed(events.SendWanted(0, LIFE, "", ASK))
    told(lead, OVER)
    lead.feed(events.SendWanted(0, key_of(other), posting, ASK))
    assert lead.done == [actions.AnswerSend(0, key_of(other), OVER)]


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_nothing_more_is_sent_for_a_transfer_that_is_over(lead: Lead, how: str) -> None:
    """The transfer is over here even before the source has heard of it."""
    posting = pulls(lead)
    (transfer,) = lead.state.transfers
    lead.call(lambda c: events.CancelTransfer(c, transfer.id))
    if how == "closed":
        lead.feed(events.CloseAnswered(access_id(), answered=True))
    assert lead.state.moves.of_posting(posting) is not None
    lead.feed(events.SendWanted(0, LIFE, posting, ASK))
    told(lead, OVER)


@pytest.mark.parametrize("ask", [ASK, MEETING], ids=["a send", "a meeting"])
def test_a_dead_peer_is_asked_for_nothing(lead: Lead, ask: SendAsk) -> None:
    gone: Any = SendAnswer(0, 1, ask.sequence, error="the peer is gone")
    lead.feed(events.SendWanted(0, "nobody@1", "", ask))
    assert lead.done == [actions.AnswerSend(0, "nobody@1", gone)]
    lead.feed(events.PeerSilent(LIFE))
    lead.tick(10.0)
    lead.feed(events.SendWanted(0, LIFE, "", ask))
    told(lead, gone)
    lost = SendAnswer(0, 1, ask.sequence, error="no answer", known=False)
    lead.feed(events.PostSendAnswered(0, LIFE, lost))
    told(lead, lost)


def introduced() -> Lead:
    """Makes a lead to which P has introduced itself, and whose rank wants to meet P's."""
    lead = Lead(describe("d", 2))
    lead.ask(lambda c: events.HandshakeReceived(c, P, endpoints(P)), principal="peer")
    lead.feed(events.SendWanted(0, LIFE, "", MEETING))
    assert not lead.done, "P does not know this lead before it has the answer"
    return lead


def test_ranks_meet_those_of_a_peer_that_dialled_once_it_knows_this_lead() -> None:
    lead = introduced()
    lead.feed(events.PeerAlive(LIFE))
    assert lead.one(actions.SendPostSend).ask is MEETING
    lead.feed(events.PeerAlive(LIFE))
    assert not lead.done
    lead.feed(events.SendWanted(0, LIFE, "", MEETING))
    assert lead.one(actions.SendPostSend)


def test_a_peer_that_repeats_its_introduction_still_does_not_know_this_lead() -> None:
    lead = introduced()
    lead.ask(lambda c: events.HandshakeReceived(c, P, endpoints(P)), principal="peer")
    assert not lead.seen(actions.SendPostSend)
    lead.feed(events.PeerAlive(LIFE))
    assert lead.one(actions.SendPostSend)


def test_ranks_are_told_that_a_peer_is_gone_that_only_introduced_itself() -> None:
    lead = introduced()
    lead.tick(lead.state.limits.peer_grace_s)
    assert lead.one(actions.AnswerSend).answer == SendAnswer(0, 1, MEET, error="the peer is gone")
    assert not lead.state.peers.meetings
    again = introduced()
    again.begin(describe("d", 3))
    assert not again.seen(actions.AnswerSend)
    assert not again.state.peers.meetings


def test_an_answer_to_a_life_that_is_over_is_told_to_nobody(lead: Lead) -> None:
    answer = SendAnswer(0, 1, 1)
    lead.begin(describe("d", 3))
    lead.admit(P)
    lead.feed(events.PostSendAnswered(0, LIFE, answer, 2))
    assert not lead.done
    lead.feed(events.PostSendAnswered(0, LIFE, answer, 3))
    told(lead, answer)
    lead.feed(events.PostSendAnswered(1, LIFE, answer))
    assert not lead.done, "this life has no such rank"
    lead.begin(None)
    lead.feed(events.PostSendAnswered(0, LIFE, answer))
    assert not lead.done


def test_a_destination_of_a_push_asks_under_the_access_that_its_source_opened_for_it() -> None:
    pair = Pair()
    pair.register(pair.reserve(32, (3, 4)).token)
    pair.finish(32, (1, 2))
    ((lead, post),) = pair.posts
    (opened,) = [action for action in pair.sent if isinstance(action, actions.SendOpen)]
    lead.feed(events.SendWanted(0, key_of(pair.p.me), post.posting_id, ASK))
    assert lead.one(actions.SendPostSend).access_id == opened.opening.reverse_access_id
