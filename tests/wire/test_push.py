"""Messages of a push: one lead receives what the other one sent."""

from typing import Any

import numpy as np
import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.tables.accesses import AccessOpening, CloseOutcome
from kvgrpc.core.values.content import ContentId, chain
from kvgrpc.errors import InvalidRequest
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2
from kvgrpc.wire import accesses, peer_calls, requests

LIMIT = 1_000
CALL = events.Call(1, "engine", "")
CALLER = peer_pb2.Caller(engine_id="p", incarnation=7)
ACCESS, REVERSE = b"a" * 16, b"r" * 16
CHAIN = chain(range(40))
OPAQUE = ContentId(40, opaque=b"prompt")


@pytest.mark.parametrize("content", [CHAIN, OPAQUE], ids=["chain", "opaque"])
def test_the_opening_of_a_push_arrives_as_it_was_sent(content: ContentId) -> None:
    opening = AccessOpening(ACCESS, b"token", None, "t-1", "req", ("shm",), REVERSE, content, 3)
    sent = accesses.open_request(opening)
    (heard,) = peer_calls.open_access(
        peer_pb2.OpenAccessRequest.FromString(sent.SerializeToString()), CALLER, CALL, LIMIT
    ).openings
    assert heard == opening


def test_the_content_of_a_push_is_no_list_of_tokens() -> None:
    row = peer_pb2.AccessOpening(push_content=common_pb2.Content(tokens=common_pb2.TokenContent(token_ids=[1])))
    with pytest.raises(InvalidRequest):
        peer_calls.open_access(peer_pb2.OpenAccessRequest(openings=[row]), CALLER, CALL, LIMIT)


def test_what_a_source_settles_arrives_as_it_was_sent() -> None:
    settling = events.AccessSettling(ACCESS, False, 99, 2, ((0, 4), (8, 2)))
    sent = accesses.settle_request(settling)
    (heard,) = peer_calls.settle_access(sent, CALLER, CALL).settlings
    assert heard == settling


def test_a_close_says_why() -> None:
    closing = events.AccessClosing(ACCESS, CloseOutcome.CANCELLED, True, b"token", "the prefill was aborted")
    (heard,) = peer_calls.close_access(accesses.close_request(closing), CALLER, CALL).closings
    assert heard == closing


def test_parts_arrive_as_they_were_sent() -> None:
    parts = (
        events.ReadyPart(0, ((0, np.array([4, 5, 9])), (1, np.array([7]))), (), (0, 2), False),
        events.ReadyPart(1, ((0, np.array([1])),), (0, 3), None, True),
    )
    heard = peer_calls.parts_ready(accesses.parts_request(ACCESS, parts), CALLER, CALL, LIMIT)
    assert (heard.engine_id, heard.incarnation, heard.access_id) == ("p", 7, ACCESS)
    for sent, part in zip(parts, heard.parts, strict=True):
        assert (part.number, part.known, part.layers, part.last) == (sent.number, sent.known, sent.layers, sent.last)
        for (group, ids), (group_heard, ids_heard) in zip(sent.blocks, part.blocks, strict=True):
            assert group == group_heard
            assert ids.tolist() == ids_heard.tolist()


def test_a_part_of_no_layers_is_refused() -> None:
    part = peer_pb2.ReadyPart(layers=common_pb2.LayerRange(first=3))
    with pytest.raises(InvalidRequest) as refused:
        peer_calls.parts_ready(peer_pb2.PartsReadyRequest(parts=[part]), CALLER, CALL, LIMIT)
    assert [violation.field for violation in refused.value.violations] == ["layers.count"]


def finish(**job: Any) -> events.FinishedBlocks:
    return requests.finished_blocks(handoff_pb2.FinishedBlocksRequest(**job), CALL, "", LIMIT)


def test_a_part_of_a_push_needs_neither_content_nor_to_be_the_last() -> None:
    part = finish(part=handoff_pb2.PushPart(layers=common_pb2.LayerRange(first=4, count=2), part_epoch=5))
    assert part.waits_for is events.WaitsFor.REGISTRATION
    assert (part.content, part.last, part.layers, part.part_epoch, part.failure) == (None, False, (4, 2), 5, "")


def test_a_source_that_cannot_deliver_says_so_even_without_words() -> None:
    assert finish(failure=handoff_pb2.SourceFailure(message="aborted")).failure == "aborted"
    assert finish(failure=handoff_pb2.SourceFailure()).failure


def test_for_readers_a_hand_over_is_one_part() -> None:
    whole = finish(for_readers=handoff_pb2.HandOver())
    assert whole.waits_for is events.WaitsFor.READERS
    assert (whole.last, whole.layers, whole.part_epoch, whole.failure) == (True, None, 0, "")


def test_what_is_finished_says_which_job_it_is() -> None:
    with pytest.raises(InvalidRequest) as refused:
        finish(transfer_key=b"k" * 16)
    assert [violation.field for violation in refused.value.violations] == ["job"]


def test_a_reservation_names_its_source_or_none() -> None:
    request = handoff_pb2.ReserveBlocksRequest(transfer_key=b"k" * 16)
    assert requests.reserve_blocks(request, CALL, "", LIMIT).source is None
    request.source.address, request.source.engine_id = "127.0.0.1:1", "p"
    assert requests.reserve_blocks(request, CALL, "", LIMIT).source == events.PushSource("127.0.0.1:1", "p")
    request.source.address = ""
    with pytest.raises(InvalidRequest):
        requests.reserve_blocks(request, CALL, "", LIMIT)


def test_a_registration_takes_a_grant() -> None:
    with pytest.raises(InvalidRequest):
        requests.register_push(handoff_pb2.RegisterPushRequest(), CALL)
    request = handoff_pb2.RegisterPushRequest(grant=common_pb2.Grant(token=b"token"))
    assert requests.register_push(request, CALL).token == b"token"


def test_a_destination_that_has_all_tokens_of_a_group_lists_it_without_blocks() -> None:
    none = np.array([], dtype=np.int64)
    blocks = ((0, none), (1, np.array([4, 5])))
    opened = events.Opened(blocks, 40, 40, 1.0, 30.0, 0, "t-1", "l-1")
    reply = peer_pb2.OpenAccessResponse()
    peer_calls.openings(actions.Openings((opened,)), reply)
    heard = accesses.opened(peer_pb2.OpenAccessResponse.FromString(reply.SerializeToString()), LIMIT)
    assert [(group, ids.tolist()) for group, ids in heard.blocks] == [(0, []), (1, [4, 5])]


def test_an_answer_says_by_which_data_paths_a_destination_reads_and_more_than_there_are_say_nothing() -> None:
    paths, none = ("cma", "nixl"), ((0, np.array([], dtype=np.int64)),)
    reply = peer_pb2.OpenAccessResponse()
    peer_calls.openings(actions.Openings((events.Opened(none, 40, 40, 1.0, 30.0, 0, data_paths=paths),)), reply)
    assert accesses.opened(reply, LIMIT).data_paths == paths
    reply.results[0].data_paths.extend([common_pb2.DATA_PATH_CMA] * len(common_pb2.DataPath.values()))
    assert accesses.opened(reply, LIMIT).data_paths == ()
