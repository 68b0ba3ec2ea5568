"""Rows are counted before they are converted, and texts that are kept are short."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.values.parts import BATCH_PARTS
from kvgrpc.errors import NOTE_BYTES_MAX, InvalidRequest, OutOfRange, Reason, note
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import (
    admin_pb2,
    common_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    pool_types_pb2,
    transfer_pb2,
)
from kvgrpc.wire import accesses, answers, bounds, description, fields, peer_calls, requests, values
from kvgrpc.wire.endpoints import endpoints_from_proto

LIMIT = 65_536
CALL = events.Call(1, "test")
CALLER = peer_pb2.Caller(engine_id="p", incarnation=7)
ROW = common_pb2.GroupBlocks()
RANGE = common_pb2.LayerRange(count=1)
LONG = "\N{SNOWMAN}" * 86
"""A text of 258 bytes in a third as many characters."""


def parts(count: int, rows: int = 0, known: int = 0) -> list[peer_pb2.ReadyPart]:
    return [peer_pb2.ReadyPart(blocks=[ROW] * rows, known_block_counts=[1] * known)] * count


def tokens(**fields: Any) -> common_pb2.Content:
    return common_pb2.Content(tokens=common_pb2.TokenContent(**fields))


def opening(**row: Any) -> peer_pb2.OpenAccessRequest:
    return peer_pb2.OpenAccessRequest(openings=[peer_pb2.AccessOpening(**row)])


def openings_of_parts(count: int) -> peer_pb2.OpenAccessRequest:
    """Makes openings with one part each, of as many blocks as a request may name."""
    whole = common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[0], counts=[LIMIT]))
    row = peer_pb2.AccessOpening(parts=[peer_pb2.ReadyPart(blocks=[whole])])
    return peer_pb2.OpenAccessRequest(openings=[row] * count)


TOO_MANY: dict[str, Callable[[], object]] = {
    "blocks": lambda: values.block_lists([ROW] * (bounds.GROUPS_MAX + 1), LIMIT),
    "content.tokens.token_ids": lambda: values.content(tokens(token_ids=[1] * (bounds.TOKENS_MAX + 1)), ""),
    "content.tokens.multimodal_items": lambda: values.content(
        tokens(token_ids=[1], multimodal_items=[common_pb2.MultimodalItem()] * (bounds.ITEMS_MAX + 1)), ""
    ),
    "openings": lambda: fields.check(
        peer_pb2.OpenAccessRequest(openings=[peer_pb2.AccessOpening()] * (bounds.ROWS_MAX + 1))
    ),
    "openings.parts": lambda: fields.check(opening(parts=parts(BATCH_PARTS + 1))),
    "openings.parts.blocks": lambda: fields.check(opening(parts=parts(257, 256))),
    "openings.parts.blocks in all": lambda: peer_calls.open_access(openings_of_parts(2), CALLER, CALL, LIMIT),
    "openings.data_paths": lambda: fields.check(
        opening(data_paths=[common_pb2.DATA_PATH_SHM] * (bounds.RANGES_MAX + 1))
    ),
    "settlings": lambda: fields.check(
        peer_pb2.SettleAccessRequest(settlings=[peer_pb2.AccessSettling()] * (bounds.ROWS_MAX + 1))
    ),
    "settlings.layers_done": lambda: fields.check(
        peer_pb2.SettleAccessRequest(
            settlings=[peer_pb2.AccessSettling(layers_done=[RANGE] * (bounds.RANGES_MAX // 2 + 1))] * 2
        )
    ),
    "closings": lambda: fields.check(
        peer_pb2.CloseAccessRequest(closings=[peer_pb2.AccessClosing()] * (bounds.ROWS_MAX + 1))
    ),
    "parts": lambda: fields.check(peer_pb2.PartsReadyRequest(parts=parts(BATCH_PARTS + 1))),
    "parts.known_block_counts": lambda: fields.check(peer_pb2.PartsReadyRequest(parts=parts(257, 0, 256))),
    "parts.blocks": lambda: fields.check(peer_pb2.PartsReadyRequest(parts=parts(257, 256))),
    "leases": lambda: requests.renew_leases(
        lease_pb2.RenewLeasesRequest(leases=[lease_pb2.LeaseRef(lease_id="l")] * 11), CALL, 10
    ),
    "transfer_ids": lambda: requests.acknowledge(
        transfer_pb2.AcknowledgeTransfersRequest(transfer_ids=["t"] * (bounds.IDS_MAX + 1)), CALL
    ),
    "group_block_counts": lambda: requests.allocate_blocks(
        pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount()] * (bounds.GROUPS_MAX + 1)), CALL
    ),
    "pool.groups": lambda: description.pool_from_proto(
        pool_types_pb2.PoolDescription(groups=[pool_types_pb2.Group()] * (bounds.GROUPS_MAX + 1)), "pool"
    ),
    "pool.regions": lambda: description.pool_from_proto(
        pool_types_pb2.PoolDescription(regions=[pool_types_pb2.Region()] * (bounds.REGIONS_MAX + 1)), "pool"
    ),
    "endpoints": lambda: endpoints_from_proto([pool_types_pb2.RankEndpoint()] * (bounds.ENDPOINTS_MAX + 1)),
    "endpoints.cma.segments": lambda: endpoints_from_proto(
        [
            pool_types_pb2.RankEndpoint(
                cma=pool_types_pb2.CmaEndpoint(segments=[pool_types_pb2.Segment()] * (bounds.SEGMENTS_MAX // 2 + 1))
            )
        ]
        * 2
    ),
    "endpoints.cuda_vmm.spans": lambda: endpoints_from_proto(
        [
            pool_types_pb2.RankEndpoint(
                cuda_vmm=pool_types_pb2.CudaVmmEndpoint(
                    spans=[pool_types_pb2.AllocationSpan()] * (bounds.SEGMENTS_MAX // 2 + 1)
                )
            )
        ]
        * 2
    ),
    "endpoints.cuda_vmm.allocations": lambda: endpoints_from_proto(
        [
            pool_types_pb2.RankEndpoint(
                cuda_vmm=pool_types_pb2.CudaVmmEndpoint(
                    allocations=[pool_types_pb2.DeviceAllocation()] * (bounds.SEGMENTS_MAX + 1)
                )
            )
        ]
    ),
}


@pytest.mark.parametrize("field", TOO_MANY)
def test_more_rows_than_a_message_may_have_are_refused_by_the_name_of_their_field(field: str) -> None:
    with pytest.raises(OutOfRange) as refused:
        TOO_MANY[field]()
    assert refused.value.reason is Reason.LIMIT_EXCEEDED
    assert [violation.field for violation in refused.value.violations] == [field.removesuffix(" in all")]


def test_blocks_are_counted_before_anything_is_made_of_their_runs() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(OutOfRange):
            peer_calls.open_access(openings_of_parts(200), CALLER, CALL, LIMIT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000, "200 lists of 65,536 ids would take 100 MB"


def test_as_many_rows_as_may_be_are_taken() -> None:
    rows = [peer_pb2.AccessClosing(access_id=bytes([i])) for i in range(2)] * (bounds.ROWS_MAX // 2)
    heard = peer_calls.close_access(peer_pb2.CloseAccessRequest(closings=rows), CALLER, CALL)
    assert len(heard.closings) == bounds.ROWS_MAX
    assert len(values.block_lists([ROW] * bounds.GROUPS_MAX, LIMIT)) == bounds.GROUPS_MAX


def engine(**fields: Any) -> handshake_pb2.EngineDescription:
    usual: dict[str, Any] = {"engine_id": "e", "incarnation": 1, "world_size": 1}
    return handshake_pb2.EngineDescription(**usual | fields)


TOO_LONG: dict[str, Callable[[], object]] = {
    "request_id": lambda: fields.check(handoff_pb2.RegisterPushRequest(request_id=LONG)),
    "idempotency_key": lambda: fields.check(handoff_pb2.RegisterPushRequest(idempotency_key=LONG)),
    "labels": lambda: requests.grant_lease(
        lease_pb2.GrantLeaseRequest(labels={"k": "\N{SNOWMAN}" * 22}), CALL, "", LIMIT
    ),
    "source.engine_id": lambda: fields.check(
        handoff_pb2.ReserveBlocksRequest(source=common_pb2.PeerAddress(address="a:1", engine_id=LONG))
    ),
    "openings.transfer_id": lambda: fields.check(opening(transfer_id=LONG)),
    "openings.request_id": lambda: fields.check(opening(request_id=LONG)),
    "engine.engine_id": lambda: description.engine_from_proto(engine(engine_id=LONG), "engine"),
    "engine.address": lambda: description.engine_from_proto(engine(address=LONG), "engine"),
    "engine.weights_revision": lambda: description.engine_from_proto(engine(weights_revision=LONG), "engine"),
    "endpoints.cuda_vmm.unavailable_reason": lambda: endpoints_from_proto(
        [pool_types_pb2.RankEndpoint(cuda_vmm=pool_types_pb2.CudaVmmEndpoint(unavailable_reason=LONG))]
    ),
}


@pytest.mark.parametrize("field", TOO_LONG)
def test_a_text_that_is_kept_is_bounded_in_bytes(field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TOO_LONG[field]()
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize("character", ["x", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{SNOWMAN}", "\N{GRINNING FACE}"])
def test_a_text_may_be_as_long_as_its_bound(character: str) -> None:
    longest = character * (bounds.TEXT_BYTES_MAX // len(character.encode()))
    assert bounds.text("field", longest) == longest
    with pytest.raises(InvalidRequest):
        bounds.text("field", longest + character)


@pytest.mark.parametrize("character", ["x", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{SNOWMAN}", "\N{GRINNING FACE}"])
def test_a_note_is_cut_where_it_is_too_long_and_says_so(character: str) -> None:
    size = len(character.encode())
    longest = character * (NOTE_BYTES_MAX // size)
    assert note(longest) == longest
    for more in (1, 2, 3, 1_000_000):
        cut = note(longest + character * more)
        assert cut.endswith("\N{HORIZONTAL ELLIPSIS}")
        assert longest.startswith(cut[:-1])
        assert NOTE_BYTES_MAX - 2 * size - 3 < len(cut.encode()) <= NOTE_BYTES_MAX


NOTES: dict[str, Callable[[str], Any]] = {
    "a source that cannot deliver": lambda why: requests.finished_blocks(
        handoff_pb2.FinishedBlocksRequest(failure=handoff_pb2.SourceFailure(message=why)),
        CALL, "", LIMIT,
    ).failure,
    "a closing": lambda why: peer_calls.close_access(
        peer_pb2.CloseAccessRequest(closings=[peer_pb2.AccessClosing(message=why)]), CALLER, CALL
    ).closings[0].message,
    "a cancellation": lambda why: requests.cancel_transfer(
        transfer_pb2.CancelTransferRequest(message=why), CALL
    ).message,
    "an operator": lambda why: requests.release_quarantine(
        admin_pb2.ReleaseQuarantineRequest(message=why), CALL
    ).why,
    "a verdict": lambda why: accesses.verdict(
        peer_pb2.SettleAccessResponse(results=[peer_pb2.SettledAccess(message=why)])
    ).message,
    "the error of a call": lambda why: values.stated_error("INTERNAL", 0, why).message,
}  # fmt: skip


@pytest.mark.parametrize("kind", NOTES)
def test_a_message_for_people_is_cut_and_not_refused(kind: str) -> None:
    said = NOTES[kind]("x" * 1_000_000)
    assert said == "x" * (NOTE_BYTES_MAX - 3) + "\N{HORIZONTAL ELLIPSIS}"
    assert NOTES[kind]("because") == "because"


@pytest.mark.parametrize("character", ["\0", "\n", "\x1b", "\x7f", "\u2028", "\u202e", "\udc80"])
def test_what_cannot_be_printed_is_written_out_in_a_note_and_never_makes_it_too_long(character: str) -> None:
    assert note(f"a{character}b") == f"a{character.encode('unicode_escape').decode()}b"
    for length in (1, 100, 400, 1024, 100_000):
        shown = note(character * length)
        assert shown.isprintable()
        assert len(shown.encode()) <= NOTE_BYTES_MAX
        assert note(shown) == shown


def test_a_trace_is_kept_only_if_it_is_one_and_short() -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    assert answers.readable_trace(trace) == trace
    assert answers.readable_trace(f"{trace}-{'x' * 100}")
    assert answers.readable_trace(f"{trace}-{'x' * 300}") == ""
    assert answers.readable_trace("x" * 55) == ""
