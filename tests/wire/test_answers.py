"""Answers: every value of the core has its value on the wire, and none is the unspecified zero."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvgrpc.core import node
from kvgrpc.core.actions import Openings, Renewed, Verdicts
from kvgrpc.core.events import Opened
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.leases import LeaseState, LeaseTimes
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Direction, Disposition, Failure, Phase, RankPath, State, Transfer, TransferPath
from kvgrpc.errors import PreconditionFailed, Reason
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, lease_pb2, transfer_pb2
from kvgrpc.wire import answers, peer_calls
from tests.core.made_leases import lease

TRANSFER = Transfer(id="t-1", direction=Direction.RECEIVE, created=100.0, key=b"secret key of 16", owner="me")


@pytest.mark.parametrize(
    ("table", "values", "name"),
    [
        (answers.DIRECTIONS, Direction, transfer_pb2.Direction.Name),
        (answers.STATES, State, transfer_pb2.TransferState.Name),
        (answers.DISPOSITIONS, Disposition, transfer_pb2.MemoryDisposition.Name),
        (answers.LEASE_STATES, LeaseState, lease_pb2.LeaseState.Name),
        (answers.PIN_KINDS, PinKind, admin_pb2.PinKind.Name),
    ],
)
def test_every_value_has_its_wire_value(table: dict[Enum, int], values: type[Enum], name: Callable[[int], str]) -> None:
    assert set(table) == set(values)
    assert all(name(number).endswith(f"_{value.name}") for value, number in table.items())
    assert 0 not in table.values(), "0 is what a reader of an older schema would take for the unsafe case"


def test_every_outcome_of_a_cancel_has_its_value() -> None:
    outcomes = {node.CANCELLED_BEFORE_ACCESS, node.CANCELLED_IN_FLIGHT, node.ALREADY_ENDED, node.TOMBSTONED}
    assert set(answers.OUTCOMES) == outcomes
    for outcome, number in answers.OUTCOMES.items():
        assert transfer_pb2.CancelOutcome.Name(number) == f"CANCEL_OUTCOME_{outcome.upper()}"


@pytest.mark.parametrize("enum", [transfer_pb2.TransferState, transfer_pb2.MemoryDisposition, admin_pb2.PinKind])
def test_the_zero_of_an_enum_is_never_sent(enum: type[Enum]) -> None:
    assert enum.Name(0).endswith("_UNSPECIFIED")  # type: ignore[attr-defined]


def test_a_transfer_s_key_stays_here() -> None:
    assert TRANSFER.key not in answers.transfer(TRANSFER, 101.0).SerializeToString()


def test_a_transfer_counts_its_times_from_its_own_beginning() -> None:
    phases = (Phase("handshake", 100.0, 100.25), Phase("open", 100.25, 101.0), Phase("queue", 101.0))
    message = answers.transfer(replace(TRANSFER, phases=phases), 103.0)
    found = [(p.phase, p.start.ToMilliseconds(), p.duration.ToMilliseconds()) for p in message.phases]
    assert found == [
        (common_pb2.TRANSFER_PHASE_HANDSHAKE, 0, 250),
        (common_pb2.TRANSFER_PHASE_OPEN, 250, 750),
        (common_pb2.TRANSFER_PHASE_QUEUE, 1000, 2000),
    ]
    assert message.age.ToMilliseconds() == 3000


def test_a_transfer_that_is_over_ages_but_its_phases_do_not() -> None:
    ended = replace(TRANSFER, state=State.FAILED, phases=(Phase("open", 100.0),), ended=101.0)
    message = answers.transfer(ended, 500.0)
    assert message.phases[0].duration.ToSeconds() == 1
    assert message.age.ToSeconds() == 400


def test_a_transfer_without_a_peer_or_failure_has_none() -> None:
    message = answers.transfer(TRANSFER, 100.0)
    assert not message.HasField("peer")
    assert not message.HasField("failure")


def test_a_transfer_says_its_peer_paths_and_failure() -> None:
    path = TransferPath(RankPath(0, 1, "cma", "same host", (("shm", "private memory"),)), nbytes=77, descriptors=3)
    full = replace(
        TRANSFER,
        peer_engine_id="p", peer_incarnation=5, peer_address="h:1", peer_transfer_id="t-9",
        paths=(path,), failure=Failure(Reason.DATA_PATH_FAILED, "broken", "wire"),
    )  # fmt: skip
    message = answers.transfer(full, 100.0)
    peer = message.peer
    assert (peer.engine_id, peer.incarnation, peer.address, peer.transfer_id) == ("p", 5, "h:1", "t-9")
    (row,) = message.paths
    assert (row.peer_rank, row.data_path) == (1, common_pb2.DATA_PATH_CMA)
    assert (row.moved_bytes, row.descriptor_count) == (77, 3)
    assert [(one.data_path, one.why) for one in row.rejected_paths] == [(common_pb2.DATA_PATH_SHM, "private memory")]
    assert message.failure.reason == common_pb2.FAILURE_REASON_DATA_PATH_FAILED


def test_a_lease_says_what_is_left_and_its_labels() -> None:
    blocks, trace = (np.array([4, 5, 9]), np.array([], dtype=np.int64)), f"00-{'ab' * 16}-{'cd' * 8}-01"
    made = lease(
        blocks=blocks, consumers=2, finished={"d", "e"}, renewals=3, trace=trace, labels=(("k", "v"),), last_ttl_s=20.0
    )
    made.opened(b"a", "e")
    message = answers.lease(made, LeaseTimes(12.5, 600.0, 17.5, 1.5), 7)
    assert (message.remaining.ToMilliseconds(), message.soft_in.ToMilliseconds()) == (12500, 1500)
    assert (message.cap_remaining.seconds, message.age.ToMilliseconds(), message.ttl.seconds) == (600, 17500, 20)
    assert (message.token_count, message.consumer_count, message.done_consumer_count) == (made.content.tokens, 2, 1)
    assert (message.open_access_count, message.renewal_count) == (1, 3)
    assert (message.trace_id, dict(message.labels)) == ("ab" * 16, {"k": "v"})
    assert message.blocks.incarnation == 7
    (row,) = message.blocks.groups
    assert (row.group, list(row.runs.starts), list(row.runs.counts)) == (0, [4, 9], [2, 1])


def test_rows_of_a_renewal_keep_their_order_and_reasons() -> None:
    rows = answers.renewed(
        Renewed(
            (
                (5.0, None, LeaseState.LIVE),
                (0.0, Reason.LEASE_EXPIRED, LeaseState.EXPIRED),
                (0.0, Reason.LEASE_NOT_FOUND, None),
            )
        )
    )
    assert [row.reason for row in rows] == [
        common_pb2.FAILURE_REASON_UNSPECIFIED,
        common_pb2.FAILURE_REASON_LEASE_EXPIRED,
        common_pb2.FAILURE_REASON_LEASE_NOT_FOUND,
    ]
    assert [row.state for row in rows] == [
        lease_pb2.LEASE_STATE_LIVE,
        lease_pb2.LEASE_STATE_EXPIRED,
        lease_pb2.LEASE_STATE_UNSPECIFIED,
    ]
    assert [row.remaining.ToSeconds() for row in rows] == [5, 0, 0]


def test_an_opening_is_open_or_says_why_not() -> None:
    opened = Opened(
        blocks=((0, np.array([7])),), token_count=16, offer_tokens=40, remaining_s=3.0, ttl_s=9.0,
        memory_generation=2, transfer_id="t-1", lease_id="l-1",
    )  # fmt: skip
    refused = PreconditionFailed(Reason.CONTENT_MISMATCH, "no")
    reply = peer_pb2.OpenAccessResponse()
    peer_calls.openings(Openings((opened, refused)), reply)
    good, bad = reply.results
    assert not good.HasField("failure")
    assert (good.token_count, good.offer_tokens, good.memory_generation, good.lease_id) == (16, 40, 2, "l-1")
    assert bad.failure.reason == common_pb2.FAILURE_REASON_CONTENT_MISMATCH


def test_a_verdict_is_valid_only_when_it_is() -> None:
    reply = peer_pb2.SettleAccessResponse()
    peer_calls.verdicts(Verdicts((Verdict(True), Verdict(False, Reason.LEASE_VOIDED, "taken back"))), reply)
    good, bad = reply.results
    assert good.verdict == peer_pb2.VERDICT_VALID
    assert (bad.verdict, bad.reason) == (peer_pb2.VERDICT_STALE, common_pb2.FAILURE_REASON_LEASE_VOIDED)


@given(st.text(max_size=80))
def test_any_text_is_a_trace_context_or_none(text: str) -> None:
    found = answers.trace_id(text)
    assert found == "" or (len(found) == 32 and found in text)


@pytest.mark.parametrize("version", ["00", "cc"])
def test_a_trace_context_of_this_or_a_later_version_is_read(version: str) -> None:
    rest = "" if version == "00" else "-later"
    assert answers.trace_id(f"{version}-{'a1' * 16}-{'b2' * 8}-01{rest}") == "a1" * 16
