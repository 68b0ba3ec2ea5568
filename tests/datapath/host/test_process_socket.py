"""The socket at which peers ask a rank's process: which tokens are valid, for whom, how often and how long."""

import gc
import itertools
import weakref

from kvgrpc.datapath.host.process_socket import TOKENS_MAX, TOKENS_OF_A_PEER, ProcessSocket, SocketReply
from kvgrpc.datapath.questions import RANKS_MAX, Answer, Question
from tests.datapath.peers import answered, ask


def test_a_token_is_good_once_for_each_rank_of_the_peer() -> None:
    proofs = itertools.count()
    socket = ProcessSocket()
    question = Question(*socket.mint("peer", "shm", lambda *_: SocketReply(str(next(proofs)).encode())))
    for rank, proof in ((None, b"0"), (0, b"1"), (1, b"2"), (RANKS_MAX - 1, b"3")):
        answer = ask(question, rank)
        assert isinstance(answer, Answer)
        assert answer.payload == proof
        answer.close()
    for rank in (None, 0, 1, RANKS_MAX - 1):
        assert "used" in str(ask(question, rank))
    for rank in (RANKS_MAX, 2**16 - 1):
        assert "unknown" in str(ask(question, rank))
    socket.close()


def test_what_each_rank_was_answered_is_kept_as_long_as_the_token_is_good() -> None:
    kept = list[weakref.ref[set[int]]]()

    def answer(*_: object) -> SocketReply:
        proof = {len(kept)}
        kept.append(weakref.ref(proof))
        return SocketReply(keeps=proof)

    socket = ProcessSocket()
    question = Question(*socket.mint("peer", "cma", answer))
    for rank in range(3):
        told = ask(question, rank)
        assert isinstance(told, Answer)
        told.close()
    assert [proof() for proof in kept] == [{0}, {1}, {2}]
    socket.revoke("peer")
    gc.collect()
    assert [proof() for proof in kept] == [None] * 3
    socket.close()


def test_a_repeated_handshake_replaces_the_tokens_of_its_peer_alone() -> None:
    socket = ProcessSocket()
    other = Question(*socket.mint("other", "shm", lambda *_: SocketReply()))
    first, *_, last = [Question(*socket.mint("peer", "shm", lambda *_: SocketReply())) for _ in range(TOKENS_MAX + 1)]
    assert not answered(first)
    assert answered(last)
    assert answered(other)
    socket.close()


def test_handshakes_of_one_life_that_run_at_once_have_tokens_of_their_own() -> None:
    socket = ProcessSocket()
    questions = [Question(*socket.mint("peer", "shm", lambda *_: SocketReply())) for _ in range(TOKENS_OF_A_PEER)]
    assert all(answered(question) for question in questions)
    socket.close()


def test_of_too_many_peers_the_one_that_was_offered_longest_ago_makes_room() -> None:
    socket = ProcessSocket()
    first, *_, last = [Question(*socket.mint(f"p{i}", "shm", lambda *_: SocketReply())) for i in range(TOKENS_MAX + 1)]
    assert not answered(first)
    assert answered(last)
    socket.close()


def test_a_revoked_peer_is_answered_nothing() -> None:
    socket = ProcessSocket()
    revoked, other = (Question(*socket.mint(peer, "shm", lambda *_: SocketReply())) for peer in ("gone", "there"))
    socket.revoke("gone")
    socket.revoke("unknown")
    assert not answered(revoked)
    assert answered(other)
    socket.close()
