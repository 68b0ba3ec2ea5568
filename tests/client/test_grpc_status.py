"""Statuses become typed errors, and nothing that a server sends breaks the decoding.

The tests build statuses with the published google.rpc classes, which the client itself does not use.
"""

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from hypothesis import given, strategies as st

from kvgrpc.client.grpc_status import DETAILS_KEY, to_error
from kvgrpc.errors import (
    BY_CODE,
    FieldViolation,
    InternalError,
    InvalidRequest,
    KVGrpcError,
    NextStep,
    PermissionDenied,
    Reason,
    Unavailable,
)
from kvgrpc.service.grpc_status import details, status_code
from kvgrpc.v1 import common_pb2
from tests.client.fake import encoded, retry_info

ANY_CODE = sorted(set(grpc.StatusCode) - {grpc.StatusCode.OK}, key=lambda code: code.name)


def error_of(code: grpc.StatusCode, message: str, *details: Message) -> KVGrpcError:
    return error_of_bytes(code, message, encoded(code, message, *details))


def error_of_bytes(code: grpc.StatusCode, message: str, value: bytes | None) -> KVGrpcError:
    trailing = aio.Metadata(("x-other", "1"), *([] if value is None else [(DETAILS_KEY, value)]))
    return to_error(aio.AioRpcError(code, aio.Metadata(), trailing, message), "PullBlocks", "host:1")


def info(reason: str, domain: str = "kvgrpc.dev", **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata)


@pytest.mark.parametrize("kind", BY_CODE.values())
@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.LEASE_EXPIRED])
def test_what_the_service_encodes_is_what_the_client_raises(kind: type[KVGrpcError], reason: Reason) -> None:
    sent = kind(
        reason,
        "no room",
        violations=(FieldViolation("blocks[0]", "is too long"), FieldViolation("ttl", "is zero")),
        retry_delay_s=1.5,
        metadata={"phase": "queue"},
    )
    code = status_code(sent)
    who = common_pb2.ResponseHeader(engine_id="P", incarnation=7)
    status = status_pb2.Status(code=code.value[0], message=str(sent), details=details(sent, who))
    got = error_of_bytes(code, str(sent), status.SerializeToString())
    assert type(got) is kind
    assert (got.reason, got.violations, got.retry_delay_s) == (reason, sent.violations, 1.5)
    assert got.metadata["phase"] == "queue"
    assert (got.next, got.engine_id, got.incarnation) == (NextStep.RETRY_HERE, "P", 7)
    assert str(got) == str(sent)


@pytest.mark.parametrize("code", ANY_CODE)
def test_every_status_has_a_class_also_without_details(code: grpc.StatusCode) -> None:
    error = error_of_bytes(code, "the proxy says no", None)
    expected = BY_CODE.get(code.name) or {
        "CANCELLED": Unavailable,
        "UNAUTHENTICATED": PermissionDenied,
        "UNKNOWN": InternalError,
    }.get(code.name)
    assert type(error) is expected
    assert "PullBlocks at host:1: the proxy says no" in str(error)
    assert error.metadata["method"] == "PullBlocks"


@pytest.mark.parametrize(("reason", "domain"), [("FROM_THE_FUTURE", "kvgrpc.dev"), ("QUEUE_FULL", "example.com")])
def test_an_unknown_reason_reads_as_internal_and_keeps_its_name(reason: str, domain: str) -> None:
    error = error_of(grpc.StatusCode.FAILED_PRECONDITION, "m", info(reason, domain=domain))
    assert error.reason is Reason.INTERNAL
    assert (error.metadata["reason"], error.metadata["domain"]) == (reason, domain)


def test_an_error_says_what_helps_and_who_refused() -> None:
    said = {"next": "RETRY_OTHER_CONSUMER", "engine_id": "P", "incarnation": str(2**53 - 1)}
    error = error_of(grpc.StatusCode.FAILED_PRECONDITION, "m", info("QUEUE_FULL", **said))
    assert (error.next, error.engine_id, error.incarnation) == (NextStep.RETRY_OTHER_CONSUMER, "P", 2**53 - 1)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"next": "ASK_AN_ORACLE", "incarnation": "many"},
        {"next": "UNSPECIFIED", "incarnation": "-1"},
        {"incarnation": "9" * 5_000},
    ],
    ids=["nothing", "words", "negative", "huge"],
)
def test_what_is_not_said_or_not_known_is_none(said: dict[str, str]) -> None:
    error = error_of(grpc.StatusCode.FAILED_PRECONDITION, "m", info("QUEUE_FULL", **said))
    assert (error.next, error.engine_id, error.incarnation) == (None, "", 0)


@pytest.mark.parametrize("next_", list(NextStep))
def test_after_a_reason_that_is_not_known_no_step_helps(next_: NextStep) -> None:
    error = error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "m", info("FROM_THE_FUTURE", next=next_, engine_id="P"))
    assert (error.next, error.metadata["next"], error.engine_id) == (None, next_, "P")


def test_another_domain_says_nothing_of_an_engine() -> None:
    said = info("QUEUE_FULL", domain="example.com", next="RETRY_HERE", engine_id="P", incarnation="7")
    error = error_of(grpc.StatusCode.FAILED_PRECONDITION, "m", said)
    assert (error.next, error.engine_id, error.incarnation) == (None, "", 0)


def test_the_steps_that_help_are_those_of_the_schema() -> None:
    schema = {name.removeprefix("NEXT_STEP_") for name in common_pb2.NextStep.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert set(NextStep) == schema


def test_details_of_other_kinds_are_passed_over() -> None:
    error = error_of(
        grpc.StatusCode.INVALID_ARGUMENT,
        "bad",
        error_details_pb2.LocalizedMessage(locale="de", message="schlecht"),
        retry_info(0.25),
        info("TTL_INVALID"),
    )
    assert isinstance(error, InvalidRequest)
    assert error.reason is Reason.TTL_INVALID
    assert error.retry_delay_s == 0.25
    assert error.message == "bad"


@given(st.binary(max_size=200))
def test_malformed_details_never_hide_the_error(value: bytes) -> None:
    error = error_of_bytes(grpc.StatusCode.NOT_FOUND, "gone", value)
    assert error.code == "NOT_FOUND"


@given(st.data())
def test_details_cut_or_changed_anywhere_never_hide_the_error(data: st.DataObject) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="f", description="d")
    whole = bytearray(
        encoded(
            grpc.StatusCode.NOT_FOUND,
            "gone",
            info("LEASE_NOT_FOUND", phase="p"),
            error_details_pb2.BadRequest(field_violations=[violation]),
            retry_info(1.0),
        )
    )
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    assert error_of_bytes(grpc.StatusCode.NOT_FOUND, "gone", cut).code == "NOT_FOUND"
