"""Any request becomes an event of the core or a typed refusal that names the field."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings, strategies as st

from kvgrpc.core import events
from kvgrpc.core.tables.accesses import CloseOutcome
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.errors import InvalidRequest, KVGrpcError, OutOfRange, Reason
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire import bounds, peer_calls, requests, values
from tests.wire.messages import messages, outcome

LIMIT = 1000
CALL = events.Call(1, "test")
CALLER = peer_pb2.Caller(engine_id="p", incarnation=7)
Convert = Callable[[Any], object]

CONVERTERS: dict[type[Message], Convert] = {
    handoff_pb2.FinishedBlocksRequest: lambda r: requests.finished_blocks(r, CALL, "w", LIMIT),
    handoff_pb2.PullBlocksRequest: lambda r: requests.pull_blocks(r, CALL, "w", LIMIT),
    lease_pb2.GrantLeaseRequest: lambda r: requests.grant_lease(r, CALL, "w", LIMIT),
    lease_pb2.RenewLeasesRequest: lambda r: requests.renew_leases(r, CALL, LIMIT),
    lease_pb2.KeepAliveRequest: lambda r: requests.renew_leases(r, CALL, LIMIT),
    lease_pb2.ReleaseLeaseRequest: lambda r: requests.release_lease(r, CALL),
    transfer_pb2.CancelTransferRequest: lambda r: requests.cancel_transfer(r, CALL),
    transfer_pb2.AcknowledgeTransfersRequest: lambda r: requests.acknowledge(r, CALL),
    pool_pb2.AllocateBlocksRequest: lambda r: requests.allocate_blocks(r, CALL),
    pool_pb2.FreeBlocksRequest: lambda r: requests.free_blocks(r, CALL, LIMIT),
    peer_pb2.OpenAccessRequest: lambda r: peer_calls.open_access(r, CALLER, CALL, LIMIT),
    peer_pb2.SettleAccessRequest: lambda r: peer_calls.settle_access(r, CALLER, CALL),
    peer_pb2.CloseAccessRequest: lambda r: peer_calls.close_access(r, CALLER, CALL),
    peer_pb2.PartsReadyRequest: lambda r: peer_calls.parts_ready(r, CALLER, CALL, LIMIT),
    peer_pb2.ChecksumBlocksRequest: lambda r: peer_calls.checksum_blocks(r, CALLER, CALL, LIMIT),
    handoff_pb2.ReserveBlocksRequest: lambda r: requests.reserve_blocks(r, CALL, "w", LIMIT),
    handoff_pb2.RegisterPushRequest: lambda r: requests.register_push(r, CALL),
}
OF_A_LIFE = common_pb2.Blocks(incarnation=7)
EVERY_REQUEST = pytest.mark.parametrize("kind", CONVERTERS, ids=lambda kind: kind.__name__)


def convert(kind: type[Message], message: Message) -> None:
    """Converts a request; any result but an event or a refusal is a defect."""
    found = outcome(lambda: CONVERTERS[kind](message))
    if isinstance(found, KVGrpcError):
        assert found.message
        assert found.reason in Reason
    else:
        assert type(found).__module__.startswith("kvgrpc.core.events.")


@EVERY_REQUEST
@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_any_request_is_an_event_or_a_typed_refusal(kind: type[Message], data: st.DataObject) -> None:
    convert(kind, data.draw(messages(kind)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("content", common_pb2.Content(opaque_id=b"x")),
        ("use_tokens", 16),
        ("request_id", "r"),
        ("priority", 1),
        ("queue_timeout", values.duration(1.0)),
        ("transfer_timeout", values.duration(1.0)),
    ],
)
def test_giving_blocks_to_a_pull_changes_nothing_else_of_it(field: str, value: Any) -> None:
    given: dict[str, Any] = {"transfer_id": "t", "destination": handoff_pb2.PullDestination()}
    later = handoff_pb2.PullBlocksRequest(**given, idempotency_key="k", transfer_key=b"k", after_step=3)
    event = requests.pull_blocks(later, CALL, "w", LIMIT)
    assert isinstance(event, events.GiveDestination)
    assert (event.key, event.after_step) == (b"k", 3)
    with pytest.raises(InvalidRequest) as refused:
        requests.pull_blocks(handoff_pb2.PullBlocksRequest(**given, **{field: value}), CALL, "w", LIMIT)
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize(
    "request_",
    [
        handoff_pb2.FinishedBlocksRequest(for_readers=handoff_pb2.HandOver(blocks=OF_A_LIFE)),
        handoff_pb2.FinishedBlocksRequest(part=handoff_pb2.PushPart(blocks=OF_A_LIFE)),
        handoff_pb2.PullBlocksRequest(destination=handoff_pb2.PullDestination(blocks=OF_A_LIFE)),
        handoff_pb2.ReserveBlocksRequest(blocks=OF_A_LIFE),
        lease_pb2.GrantLeaseRequest(blocks=OF_A_LIFE),
        pool_pb2.FreeBlocksRequest(blocks=OF_A_LIFE),
    ],
    ids=lambda request: f"{type(request).__name__} {request.ListFields()[0][0].name}",
)
def test_a_call_says_of_which_life_its_block_ids_are(request_: Message) -> None:
    assert requests.make_call(1, "me", "", "M", request_).incarnation == 7
    assert requests.make_call(1, "me", "", "M", type(request_)()).incarnation == 0
    keyed = type(request_)(idempotency_key="k")
    keyed.MergeFrom(request_)
    assert requests.make_call(1, "me", "", "M", keyed).incarnation == 7


@EVERY_REQUEST
@given(data=st.binary(max_size=200))
def test_any_bytes_that_parse_are_an_event_or_a_typed_refusal(kind: type[Message], data: bytes) -> None:
    try:
        message = kind.FromString(data)
    except DecodeError:
        return
    convert(kind, message)


@given(st.text(max_size=300), st.booleans())
def test_a_key_makes_a_call_comparable_by_its_whole_body(key: str, last: bool) -> None:
    request = handoff_pb2.PullBlocksRequest(idempotency_key=key, validate_only=last)
    other = handoff_pb2.PullBlocksRequest(idempotency_key=key, validate_only=not last)
    found = [outcome(lambda: requests.make_call(7, "me", "", "M", row)) for row in (request, request, other)]  # noqa: B023
    call, same, different = found
    if isinstance(call, KVGrpcError) or isinstance(same, KVGrpcError) or isinstance(different, KVGrpcError):
        assert len(key.encode()) > bounds.TEXT_BYTES_MAX
        return
    assert (call.id, call.principal, call.key, call.method) == (7, "me", key, "M" if key else "")
    assert call.body == same.body
    assert (call.body != different.body) is bool(key)


@pytest.mark.parametrize("number", [0, 1, 2, 77, -1])
def test_an_abort_means_release_unless_keep_is_said(number: int) -> None:
    expected = OnAbort.KEEP if number == common_pb2.ON_ABORT_KEEP else OnAbort.RELEASE
    assert values.on_abort(number) is expected


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (0, CloseOutcome.FAILED), (1, CloseOutcome.DROPPED), (2, CloseOutcome.FAILED), (3, CloseOutcome.CANCELLED),
        (77, CloseOutcome.FAILED),
    ],
)  # fmt: skip
def test_a_close_takes_nothing_from_others_unless_that_is_said(number: int, outcome: CloseOutcome) -> None:
    row = peer_pb2.AccessClosing(access_id=b"x", outcome=number, quiesced=True, token=b"t")  # type: ignore[arg-type]
    (closing,) = peer_calls.close_access(peer_pb2.CloseAccessRequest(closings=[row]), CALLER, CALL).closings
    assert closing == events.AccessClosing(b"x", outcome, True, b"t")


def test_a_pull_gets_an_access_id_of_its_own_each_time() -> None:
    grant = values.grant(_token())
    request = handoff_pb2.PullBlocksRequest(grant=grant)
    made = [requests.pull_blocks(request, CALL, "w", LIMIT) for _ in range(2)]
    assert all(isinstance(event, events.PullBlocks) for event in made)
    assert len({event.access_id for event in made if isinstance(event, events.PullBlocks)}) == 2


def test_no_destination_and_an_empty_one_are_two_things() -> None:
    request = handoff_pb2.PullBlocksRequest(grant=values.grant(_token()))
    waiting = requests.pull_blocks(request, CALL, "w", LIMIT)
    request.destination.SetInParent()
    nowhere = requests.pull_blocks(request, CALL, "w", LIMIT)
    assert isinstance(waiting, events.PullBlocks)
    assert isinstance(nowhere, events.PullBlocks)
    assert waiting.destination is None
    assert nowhere.destination is not None
    assert nowhere.destination.blocks == ()


def test_a_grant_says_in_clear_what_its_token_says() -> None:
    grant = values.grant(_token())
    claims = values.claims_of(grant)
    assert (grant.engine_id, grant.address, grant.lease_id) == (claims.engine_id, claims.address, claims.lease_id)
    assert (grant.block_count, grant.token_count, grant.incarnation) == (3, 40, 9)
    assert grant.access == common_pb2.ACCESS_KIND_READ
    assert grant.ByteSize() <= 512


def _token() -> bytes:
    from kvgrpc.core.values import grants

    claims = grants.Claims(grants.AccessKind.READ, "engine", 9, "127.0.0.1:1", "l-1", b"k" * 16, 30.0, 3, 40)
    return grants.mint(claims, b"key")


def test_checksums_and_parts_name_so_many_blocks_in_all() -> None:
    """The blocks that a small message can expand to are bounded before they are expanded."""
    runs = common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[0], counts=[LIMIT]))
    sums = peer_pb2.ChecksumBlocksRequest()
    sums.blocks.add(blocks=[runs])
    assert peer_calls.checksum_blocks(sums, CALLER, CALL, LIMIT).blocks
    sums.blocks.add(blocks=[runs])
    with pytest.raises(OutOfRange):
        peer_calls.checksum_blocks(sums, CALLER, CALL, LIMIT)
    parts = peer_pb2.PartsReadyRequest()
    parts.parts.add(blocks=[runs])
    parts.parts.add(number=1, known_block_counts=[LIMIT])
    assert len(peer_calls.parts_ready(parts, CALLER, CALL, LIMIT).parts) == 2
    parts.parts.add(number=2, blocks=[runs])
    with pytest.raises(OutOfRange):
        peer_calls.parts_ready(parts, CALLER, CALL, LIMIT)
