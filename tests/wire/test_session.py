"""Messages of a session: reports of a rank and commands of a lead arrive unchanged, however the stream is cut."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from kvgrpc.core import actions, events
from kvgrpc.core.actions import (
    AnswerSend,
    AwaitEnd,
    ComputeChecksums,
    CopyOut,
    Expect,
    MakeOffer,
    MapPeer,
    Operation,
    Post,
    RankAction,
    Rekey,
    UnmapPeer,
)
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.core.values.sends import SendAnswer
from kvgrpc.core.values.telemetry import MoveTelemetry
from kvgrpc.errors import InvalidRequest, OutOfRange, Reason, Unimplemented
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.v1 import common_pb2
from kvgrpc.wire import frames, session
from kvgrpc.wire.rank_commands import action_of, command_of, post_of
from kvgrpc.wire.values import FEW
from tests.wire.endpoints import ENDPOINTS, TEXT
from tests.wire.messages import messages, outcome

U63 = st.integers(0, 2**63 - 1)
RANK = st.integers(0, 2**32 - 1)
VALUES = st.sampled_from([(), (("token", b"t"), ("0", b"there"))])
REPORTS = st.one_of(
    st.builds(events.EndpointOffered, st.just(3), TEXT, ENDPOINTS),
    st.builds(
        events.PeerMapped,
        st.just(3),
        TEXT,
        TEXT,
        TEXT,
        st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple),
        U63,
        RANK,
        st.booleans(),
    ),
    st.builds(events.MeetingBegan, st.just(3), TEXT, U63, RANK),
    st.builds(events.ProcessEnded, st.just(3), TEXT, st.booleans(), RANK),
    st.builds(
        events.PostingEnded,
        TEXT,
        st.booleans(),
        U63,
        st.integers(0, 10**9).map(lambda micros: micros / 1e6),
        TEXT,
        st.booleans(),
        st.booleans(),
        st.integers(0, 10**9).map(lambda micros: micros / 1e6),
    ).filter(lambda end: end.quiesced or not end.done),
    st.builds(events.StepDone, st.just(3), U63),
    st.builds(events.CopiedOut, st.just(3), TEXT, TEXT),
    st.builds(events.SendPosted, st.just(3), TEXT, VALUES, TEXT, st.booleans()),
)


@given(REPORTS)
@example(events.PostingEnded("p", done=False, wire_s=1.582445))
def test_a_report_of_a_rank_comes_back_as_it_went(event: events.Event) -> None:
    message = rank_pb2.RankReport.FromString(session.event_to_report(event).SerializeToString())
    assert session.report_to_event(3, message) == event


COMMANDS: st.SearchStrategy[RankAction] = st.one_of(
    st.builds(MakeOffer, st.just(3), TEXT, TEXT),
    st.builds(MapPeer, st.just(3), TEXT, ENDPOINTS, U63, st.lists(TEXT, max_size=3).map(tuple)),
    st.builds(UnmapPeer, st.just(3), TEXT, st.booleans(), st.booleans(), st.none() | RANK),
    st.builds(Expect, TEXT, st.booleans(), st.booleans()),
    st.builds(AwaitEnd, st.just(3), TEXT),
    st.just(Rekey(3)),
    st.builds(
        AnswerSend,
        st.just(3),
        TEXT,
        st.builds(SendAnswer, RANK, RANK, U63, VALUES, TEXT, st.booleans(), st.booleans(), st.booleans()),
    ),
)


@given(COMMANDS)
def test_a_command_to_a_rank_comes_back_as_it_went(action: RankAction) -> None:
    assert action_of(3, rank_pb2.RankCommand.FromString(command_of(action).SerializeToString())) == action


def test_a_command_of_a_newer_lead_is_ignored() -> None:
    assert action_of(3, rank_pb2.RankCommand()) is None


@given(messages(rank_pb2.RankReport))
def test_any_report_is_an_event_or_nothing_or_refused(report: rank_pb2.RankReport) -> None:
    event = outcome(lambda: session.report_to_event(0, report))
    assert (event is None) is (report.WhichOneof("report") is None)


@pytest.mark.parametrize(("done", "quiesced"), [(False, False), (True, True)])
def test_an_end_that_says_nothing_of_proof_is_proved_only_if_all_arrived(done: bool, quiesced: bool) -> None:
    end = rank_pb2.PostingReport(posting_id="p", done=done)
    event = session.report_to_event(0, rank_pb2.RankReport(posting=end))
    assert event == events.PostingEnded("p", done=done, quiesced=quiesced)


def test_a_report_of_some_layers_is_not_the_end_of_their_step() -> None:
    some = rank_pb2.StepReport(step=3, layers=common_pb2.LayerRange(first=0, count=1))
    assert session.report_to_event(0, rank_pb2.RankReport(step=some)) == events.StepDone(0, 3, (0, 1))
    assert session.step_report(3, (0, 1)) == some
    whole = rank_pb2.RankReport(step=rank_pb2.StepReport(step=3))
    assert session.report_to_event(0, whole) == events.StepDone(0, 3)


@pytest.mark.parametrize("kind", [rank_pb2.ConnectCommand, rank_pb2.PostCommand, rank_pb2.ConnectReport])
def test_a_message_without_a_rank_of_the_peer_means_the_one_with_the_own_number(kind: Any) -> None:
    assert [session.peer_rank_of(2, message) for message in (kind(), kind(peer_rank=0), kind(peer_rank=3))] == [2, 0, 3]


def test_a_report_without_a_rank_of_the_peer_is_of_the_one_with_the_own_number() -> None:
    connect = rank_pb2.RankReport(connect=rank_pb2.ConnectReport(peer="p", data_path="shm"))
    assert session.report_to_event(2, connect) == events.PeerMapped(2, "p", "shm", "", peer_rank=2)
    process = rank_pb2.RankReport(process=rank_pb2.ProcessReport(peer="p", drained=True))
    assert session.report_to_event(2, process) == events.ProcessEnded(2, "p", drained=True, peer_rank=2)


def test_a_peer_is_forgotten_with_all_its_ranks() -> None:
    assert not command_of(UnmapPeer(0, "p")).disconnect.HasField("peer_rank")


def test_a_rank_is_connected_to_the_rank_that_the_endpoint_names() -> None:
    assert command_of(MapPeer(0, "p", RankEndpoint(5), 1)).connect.peer_rank == 5


def posted(post: Post) -> Post:
    """Returns the posting as its worker gets it."""
    command = command_of(post)
    return post_of(post.rank, rank_pb2.RankCommand.FromString(command.SerializeToString()).post)


@given(st.lists(st.tuples(U63, U63, U63), max_size=20), st.sampled_from(Operation), RANK)
def test_a_posting_comes_back_as_it_went(
    rows: list[tuple[int, int, int]], operation: Operation, peer_rank: int
) -> None:
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
    found = posted(Post(2, "p", "peer", Runs(*columns), "t", operation, peer_rank=peer_rank))
    assert (found.rank, found.posting_id, found.peer, found.operation) == (2, "p", "peer", operation)
    assert (found.peer_rank, found.checksums) == (peer_rank, None)
    assert [found.runs.src.tolist(), found.runs.dst.tolist(), found.runs.nbytes.tolist()] == columns.tolist()


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_many_runs_are_written_as_protobuf_writes_them(count: int) -> None:
    columns = np.random.default_rng(1).integers(1 << 56, size=(3, count)) >> np.arange(count) % 57
    checksums = ComputeChecksums(0, "s", Pieces(*columns % (1 << 31)))
    post = command_of(Post(0, "p", "peer", Runs(*columns), "t", checksums=checksums)).post
    usual = rank_pb2.PostCommand(src=columns[0].tolist(), dst=columns[1].tolist(), nbytes=columns[2].tolist())
    assert (post.src, post.dst, post.nbytes) == (usual.src, usual.dst, usual.nbytes)
    found = post_of(0, post).checksums
    assert found is not None
    for name, column in zip(("offsets", "nbytes", "counts"), columns % (1 << 31), strict=True):
        assert getattr(found.pieces, name).tolist() == column.tolist()


def test_the_checksums_of_a_posting_come_back_as_they_went() -> None:
    runs = Runs(*np.zeros((3, 0), dtype=np.int64))
    pieces = Pieces(*(np.array(column, dtype=np.int64) for column in ([5, 6, 7], [1, 2, 3], [2, 1])))
    found = posted(Post(2, "p", "peer", runs, "t", checksums=ComputeChecksums(2, "s", pieces))).checksums
    assert found is not None
    assert (found.rank, found.name) == (2, "s")
    for name in ("offsets", "nbytes", "counts"):
        assert getattr(found.pieces, name).tolist() == getattr(pieces, name).tolist()


@pytest.mark.parametrize("count", [0, 3, FEW + 1])
def test_what_is_copied_out_comes_back_as_it_went(count: int) -> None:
    offsets, nbytes = np.random.default_rng(count).integers(1 << 56, size=(2, count))
    made = command_of(CopyOut(0, "c1", Pieces(offsets, nbytes, np.ones(count, dtype=np.int64))))
    found = action_of(0, rank_pb2.RankCommand.FromString(made.SerializeToString()))
    assert isinstance(found, CopyOut)
    assert found.name == "c1"
    assert [found.pieces.offsets.tolist(), found.pieces.nbytes.tolist()] == [offsets.tolist(), nbytes.tolist()]


def test_a_posting_that_does_not_say_which_way_is_refused() -> None:
    newer = rank_pb2.PostCommand.FromString(bytes([rank_pb2.PostCommand.OPERATION_FIELD_NUMBER << 3, 100]))
    for command in (rank_pb2.PostCommand(), newer):
        with pytest.raises(Unimplemented) as refused:
            post_of(0, command)
        assert refused.value.reason is Reason.FEATURE_UNAVAILABLE


def message(key: str) -> rank_pb2.RankCommand:
    return command_of(MakeOffer(0, key, "p@1"))


@given(st.lists(TEXT, max_size=10), st.lists(st.integers(0, 400), max_size=8))
def test_frames_come_out_whole_and_in_order_wherever_the_stream_is_cut(keys: list[str], cuts: list[int]) -> None:
    stream = b"".join(frames.encode(message(key)) for key in keys)
    reader = frames.FrameReader(rank_pb2.RankCommand)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    found = [row for start, end in pairwise(edges) for row in reader.feed(stream[start:end])]
    assert [row.offer.key for row in found] == keys


@given(st.binary(max_size=100))
def test_any_bytes_are_frames_or_a_typed_refusal(data: bytes) -> None:
    reader = frames.FrameReader(rank_pb2.RankCommand)
    found = outcome(lambda: list(reader.feed(data)))
    assert isinstance(found, list | InvalidRequest | OutOfRange)


def test_a_frame_that_says_it_is_too_long_is_refused_before_it_is_read() -> None:
    reader = frames.FrameReader(rank_pb2.RankCommand)
    with pytest.raises(OutOfRange):
        list(reader.feed((frames.FRAME_BYTES_MAX + 1).to_bytes(4, "big")))


def test_what_moved_comes_back_as_it_went() -> None:
    one, other = MoveTelemetry(2**40, 7, 1.582445, 0.000001), MoveTelemetry(1, 1, 0.5, 0.25)
    received, returned = session_pb2.Event(), session_pb2.Event()
    session.put_news(actions.ReceivedNews("t", "r", 3, one), received)
    session.put_news(actions.BlocksReturnedNews("t", "r", "l", (one, other)), returned)
    assert session.telemetry_from_proto(received.received.telemetry) == one
    assert [*map(session.telemetry_from_proto, returned.blocks_returned.telemetries)] == [one, other]


def test_who_moved_nothing_is_told_of_nothing() -> None:
    received = session_pb2.Event()
    session.put_news(actions.ReceivedNews("t", "r", 3), received)
    assert not received.received.HasField("telemetry")
