"""Rules for connecting ranks, and the end of a rank that sends invalid messages or nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.engine import BlocksReturned, Engine, Event, Failed, LeadDied, Rank, RankTicket, content
from kvgrpc.errors import (
    AlreadyExists,
    KVGrpcError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
    Unimplemented,
)
from kvgrpc.rank_link.link import ANSWER_S
from kvgrpc.session.v1 import rank_pb2
from kvgrpc.v1 import pool_types_pb2
from kvgrpc.wire.bounds import FRAME_ROWS_MAX, NAMES_MAX
from kvgrpc.wire.description import pool_from_proto
from tests.chaos.network import Proxy
from tests.engine.conftest import Leads
from tests.engine.made import layout
from tests.engine.ranks.conftest import Connect
from tests.engine.ranks.moves import GRACE_S
from tests.engine.ranks.streams import stream_to
from tests.engine.support import Lead, new_key, refused, tokens
from tests.service.conftest import TEST_S
from tests.service.engines import HOME, ServeProcess, wait_until

pytestmark = pytest.mark.timeout(TEST_S)


def over(engine: Engine) -> str:
    """Returns why the engine's life ended."""
    with pytest.raises(LeadDied) as caught:
        wait_until(lambda: engine.poll(0.1) is None)
    return caught.value.message


def made_rank(ticket: RankTicket, rank: int = 1, pool: PoolLayout | None = None) -> Rank:
    memory = np.zeros((pool or layout()).total_bytes, np.uint8)
    return Rank(ticket, rank, [memory], data_paths=("nixl",))


def test_a_rank_is_told_the_pool_and_the_grace_and_hears_of_its_engines_end(engine: Engine, connect: Connect) -> None:
    stream = connect(ticket=engine.ticket.secret, rank=1)
    first = stream.hear()
    assert pool_from_proto(first.attached.pool, "pool") == layout()
    assert first.attached.shared_bytes == 0
    assert (first.header.engine_id, first.header.incarnation) == (engine.engine_id, engine.incarnation)
    assert first.grace.ToNanoseconds() == GRACE_S * 1e9
    engine.close()
    assert stream.hear().over.message == "the engine is gone"
    with pytest.raises(StopIteration):
        stream.hear()


@pytest.mark.parametrize(
    ("introduction", "code", "reason"),
    [
        ({"ticket": b"0" * 32}, "PERMISSION_DENIED", "NOT_OWNER"),
        ({"ticket": b""}, "PERMISSION_DENIED", "NOT_OWNER"),
        ({"ticket": b"0" * 5000}, "INVALID_ARGUMENT", "INVALID_FIELD"),
        ({"rank": 2}, "FAILED_PRECONDITION", "POOL_KIND_MISMATCH"),
        ({"rank": (1 << 32) - 1}, "FAILED_PRECONDITION", "POOL_KIND_MISMATCH"),
        ({"returns": True}, "PERMISSION_DENIED", "NOT_OWNER"),
        ({"reports": [rank_pb2.RankReport()]}, "INVALID_ARGUMENT", "INVALID_FIELD"),
        ({"reports": [rank_pb2.RankReport()] * (FRAME_ROWS_MAX + 1)}, "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
        ({"message": b"\xff\xff"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ],
    ids=["wrong", "none", "long", "no such rank", "largest", "returns", "reports", "many", "garbage"],
)
def test_a_stranger_is_refused_and_the_engine_lives(
    engine: Engine, connect: Connect, introduction: dict[str, Any], code: str, reason: str
) -> None:
    whole = introduction if "message" in introduction else {"ticket": engine.ticket.secret, "rank": 1, **introduction}
    found = connect(**whole).refusal()
    assert (found.code, found.reason) == (code, reason)
    assert engine.ticket.secret.hex() not in found.message
    assert engine.poll() == []
    connect(ticket=engine.ticket.secret, rank=1).hear()


def test_a_rank_connects_once(engine: Engine, connect: Connect) -> None:
    first = connect(ticket=engine.ticket.secret, rank=1)
    first.hear()
    found = connect(ticket=engine.ticket.secret, rank=1).refusal()
    assert (found.code, found.reason) == ("ALREADY_EXISTS", "ENGINE_ATTACHED")
    with Rank(engine.ticket, 0, [np.zeros(layout().total_bytes, np.uint8)], data_paths=("nixl",)):
        found = connect(ticket=engine.ticket.secret, rank=0).refusal()  # rank 0 has a local worker
        assert (found.code, found.reason) == ("ALREADY_EXISTS", "ENGINE_ATTACHED")
    first.end()


def test_shared_memory_does_not_leave_its_host_and_the_refusal_says_what_would(
    impatient: Lead, connect: Connect
) -> None:
    with Engine.attach(impatient.socket_path, pool=layout()) as shared:
        found = connect(ticket=shared.ticket.secret, rank=0).refusal()
        assert (found.code, found.reason) == ("FAILED_PRECONDITION", "POOL_KIND_MISMATCH")
        with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed) as bare:
            Rank(shared.remote_ticket)
        assert "give it tensors or a device" in str(bare.value)
        with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed) as given:
            made_rank(shared.remote_ticket, 0)
        assert "attach it with private_memory or mirrored" in str(given.value)
        assert shared.poll() == []


def many(count: int) -> dict[str, Any]:
    return {"reports": [rank_pb2.RankReport(step=rank_pb2.StepReport(step=1))] * count}


def offer(rank: int) -> dict[str, Any]:
    endpoint = pool_types_pb2.RankEndpoint(rank=rank)
    return {"reports": [rank_pb2.RankReport(offer=rank_pb2.OfferReport(endpoint=endpoint))]}


@pytest.mark.parametrize(
    ("report", "code", "reason"),
    [
        (many(FRAME_ROWS_MAX + 1), "OUT_OF_RANGE", "LIMIT_EXCEEDED"),
        (
            {
                "reports": [
                    rank_pb2.RankReport(
                        connect=rank_pb2.ConnectReport(rejected=[rank_pb2.RejectedPath()] * (NAMES_MAX + 1))
                    )
                ]
            },
            "OUT_OF_RANGE",
            "LIMIT_EXCEEDED",
        ),
        (
            {"reports": [rank_pb2.RankReport(posting=rank_pb2.PostingReport(posting_id="p" * 5000))]},
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
        ),
        (offer(rank=0), "INVALID_ARGUMENT", "INVALID_FIELD"),
        (offer(rank=2), "INVALID_ARGUMENT", "INVALID_FIELD"),
        ({"message": b"\xff\xff"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ],
    ids=["many", "many paths", "long", "another rank's endpoint", "no rank's endpoint", "garbage"],
)
def test_a_rank_that_says_what_it_must_not_ends_its_engine_and_no_other(
    impatient: Lead, engine: Engine, connect: Connect, report: dict[str, Any], code: str, reason: str
) -> None:
    stream = connect(ticket=engine.ticket.secret, rank=1)
    stream.hear()
    stream.say(**report)
    found = stream.refusal()
    assert (found.code, found.reason) == (code, reason)
    assert "worker of rank 1" in over(engine)
    impatient.wait_no_engine()
    with Engine.attach(impatient.socket_path, pool=layout()) as following:
        assert following.poll() == []


def test_as_many_reports_as_may_be_are_taken(engine: Engine, connect: Connect) -> None:
    stream = connect(ticket=engine.ticket.secret, rank=1)
    stream.hear()
    stream.say(**many(FRAME_ROWS_MAX))
    stream.end()
    assert stream.last() is None, "it ends in order: nothing was refused before"
    assert "the worker of rank 1 is gone" in over(engine)


def test_silence_ends_a_stream_before_its_first_message_and_its_engine_after_it(
    engine: Engine, impatient: Lead, connect: Connect
) -> None:
    silent = stream_to(impatient)
    stream = connect(ticket=engine.ticket.secret, rank=1)
    found = stream.refusal()
    assert (found.code, found.reason, found.metadata["phase"]) == ("DEADLINE_EXCEEDED", "DEADLINE", "rank")
    assert f"said nothing for {GRACE_S:g} s" in over(engine)
    found = silent.refusal()
    assert (found.code, found.reason, found.metadata["phase"]) == ("DEADLINE_EXCEEDED", "DEADLINE", "attach")


@pytest.mark.parametrize("how", ["end", "cut"])
def test_the_end_of_a_stream_is_the_end_of_its_engine(engine: Engine, connect: Connect, how: str) -> None:
    stream = connect(ticket=engine.ticket.secret, rank=1)
    stream.hear()
    getattr(stream, how)()
    assert "the worker of rank 1 is gone" in over(engine)


def test_a_rank_that_never_comes_fails_who_would_read_it_and_not_its_engine(engine: Engine, leads: Leads) -> None:
    with (
        Rank(engine.ticket, 0, [np.zeros(layout().total_bytes, np.uint8)], data_paths=("nixl",)),
        Engine.attach(leads[1].socket_path, pool=layout(), world_size=2) as reader,
    ):
        handover = engine.finished_blocks([1, 2], content(tokens(32)), transfer_key=new_key(), ttl_s=60.0)
        engine.flush()
        reader.pull(handover.grant, content(tokens(32))).start([3, 4])
        events: list[Event] = []

        def heard() -> bool:
            events.extend(reader.poll(0.1))
            return len(events) == 2

        wait_until(heard, what=lambda: events)
        failed, returned = events
        assert isinstance(failed, Failed)
        assert isinstance(returned, BlocksReturned)
        assert (failed.reason, failed.phase) == (Reason.PEER_UNREACHABLE, "handshake"), failed
        assert engine.poll() == []
    over(engine)


# -- the same refusals, as a worker sees them


def test_a_worker_learns_why_it_is_refused(engine: Engine, leads: Leads, impatient: Lead) -> None:
    ticket = engine.remote_ticket
    cases: list[tuple[RankTicket, int, Reason, type[KVGrpcError]]] = [
        (RankTicket("", b"0" * 32, ticket.memory_bytes, address=ticket.address), 1, Reason.NOT_OWNER, PermissionDenied),
        (ticket, 2, Reason.POOL_KIND_MISMATCH, PreconditionFailed),
        (
            RankTicket("", ticket.secret, ticket.memory_bytes, address=f"{HOME}:1"),
            1,
            Reason.PEER_UNREACHABLE,
            Unavailable,
        ),
    ]
    for wrong, rank, reason, kind in cases:
        with refused(reason, kind):
            made_rank(wrong, rank)
    with made_rank(ticket):
        with refused(Reason.ENGINE_ATTACHED, AlreadyExists):
            made_rank(ticket)
        assert engine.poll() == []
    over(engine)


def test_a_network_that_answers_nothing_is_waited_for_so_long_and_said(engine: Engine, impatient: Lead) -> None:
    proxy = Proxy()
    proxy.cut()
    try:
        with pytest.raises(Unavailable, match=f"said nothing for {ANSWER_S:g} s") as caught:
            made_rank(replace(engine.remote_ticket, address=proxy.address))
    finally:
        proxy.close()
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    assert engine.poll() == []


def test_a_server_without_a_session_socket_has_no_ranks(tmp_path: Any) -> None:
    process = ServeProcess(tmp_path / "alone", "--listen", f"{HOME}:0", "--drain-s", "0")
    try:
        address = process.wait_ready()["address"]
        with refused(Reason.FEATURE_UNAVAILABLE, Unimplemented):
            made_rank(RankTicket("", b"0" * 32, layout().total_bytes, address=address))
    finally:
        process.end()
