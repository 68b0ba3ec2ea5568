"""Errors become statuses and come back: every class has its code, every detail survives, and unknown reasons do not."""

from typing import NoReturn

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata
from hypothesis import given, strategies as st

from kvgrpc.errors import BY_CODE, FieldViolation, InternalError, KVGrpcError, NextStep, Reason
from kvgrpc.service import grpc_status
from kvgrpc.v1 import common_pb2
from kvgrpc.v1.common_pb2 import FAILURE_REASON_QUEUE_FULL
from kvgrpc.wire.values import stated_error

WHO = common_pb2.ResponseHeader(engine_id="P", incarnation=7)
CLASSES = sorted(BY_CODE.values(), key=lambda kind: kind.code)


class Call:
    """The context of a call; it records the arguments of `abort`."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.trailers: tuple[tuple[str, bytes], ...] = ()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        self.code, self.details, self.trailers = code, details, trailing_metadata
        raise grpc.aio.AbortError


async def travelled(error: KVGrpcError) -> KVGrpcError:
    """Returns the error as the other side of a call gets it."""
    call = Call()
    with pytest.raises(grpc.aio.AbortError):
        await grpc_status.abort(call, error, WHO)
    return grpc_status.from_rpc_error(AioRpcError(call.code, Metadata(), Metadata(*call.trailers), call.details))


def test_every_class_has_a_code_of_its_own() -> None:
    assert [kind for kind in CLASSES if grpc_status.status_code(kind(Reason.INTERNAL, "x")).name != kind.code] == []
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)


def test_an_error_that_a_message_states_has_the_class_of_its_code() -> None:
    stated = {kind: stated_error(kind.code, FAILURE_REASON_QUEUE_FULL, "too much") for kind in CLASSES}
    assert [kind for kind, error in stated.items() if type(error) is not kind] == []
    assert {(error.reason, error.message) for error in stated.values()} == {(Reason.QUEUE_FULL, "too much")}


@pytest.mark.parametrize("code", ["", "OK", "of a newer version"])
def test_an_error_of_an_unknown_code_is_the_failure_of_who_stated_it(code: str) -> None:
    assert type(stated_error(code, FAILURE_REASON_QUEUE_FULL, "too much")) is InternalError


async def test_an_error_comes_back_as_it_went(subtests: pytest.Subtests) -> None:
    for kind in CLASSES:
        error = kind(
            Reason.QUEUE_FULL,
            "too much",
            violations=(FieldViolation("a.b[0]", "is wrong"),),
            retry_delay_s=1.5,
            metadata={"phase": "open"},
        )
        with subtests.test(kind=kind):
            back = await travelled(error)
            assert type(back) is kind
            assert (back.reason, back.violations) == (error.reason, error.violations)
            assert back.metadata == {"phase": "open", "next": "RETRY_HERE", "engine_id": "P", "incarnation": "7"}
            assert str(back) == str(error)


async def test_an_error_that_is_too_long_for_a_status_says_nothing_twice() -> None:
    violations = tuple(FieldViolation(f"field[{i}]", f"{i} " * 100) for i in range(16))
    back = await travelled(InternalError(Reason.INTERNAL, "too much", violations=violations))
    assert (back.message, back.violations) == ("too much", violations)


async def test_every_reason_travels() -> None:
    arrived = {reason: (await travelled(InternalError(reason, "x"))).reason for reason in Reason}
    assert [(sent, got) for sent, got in arrived.items() if got is not sent] == []


def test_a_refusal_says_what_helps_and_a_retry_helps_where_there_is_a_delay() -> None:
    wrong = [
        (kind.__name__, reason)
        for kind in CLASSES
        for reason in Reason
        if grpc_status.next_step(kind(reason, "x", retry_delay_s=0.1)) is not NextStep.RETRY_HERE
        or grpc_status.next_step(kind(reason, "x")) not in NextStep
    ]
    assert wrong == []


async def test_an_error_of_another_engine_keeps_its_name() -> None:
    error = InternalError(Reason.PEER_FAILED, "x", metadata={"engine_id": "Q", "incarnation": "9", "next": "RECOMPUTE"})
    assert (await travelled(error)).metadata == error.metadata


async def test_a_status_fits_into_headers_however_much_is_wrong() -> None:
    violations = tuple(FieldViolation("f" * 50, "d" * 50) for _ in range(1000))
    call = Call()
    with pytest.raises(grpc.aio.AbortError):
        await grpc_status.abort(call, InternalError(Reason.INVALID_FIELD, "m" * 100_000, violations=violations), WHO)
    assert len(call.details) + sum(len(value) for _, value in call.trailers) < 8192


def test_the_domain_of_a_reason_is_ours() -> None:
    info, found = error_details_pb2.ErrorInfo(), grpc_status.details(InternalError(Reason.PEER_LOST, "x"), WHO)
    assert found[0].Unpack(info)
    assert (info.domain, info.reason) == ("kvgrpc.dev", "PEER_LOST")


def test_a_status_without_our_details_is_an_error_of_its_code_s_class() -> None:
    read = {
        code: grpc_status.from_rpc_error(AioRpcError(code, Metadata(), Metadata(), "no")) for code in grpc.StatusCode
    }
    assert {code: type(error) for code, error in read.items()} == {
        code: BY_CODE.get(code.name, InternalError) for code in grpc.StatusCode
    }
    assert {error.reason for error in read.values()} == {Reason.PEER_FAILED, Reason.PEER_UNREACHABLE}


@given(st.binary(max_size=200))
def test_any_details_are_read_as_far_as_they_go(data: bytes) -> None:
    trailers = Metadata((grpc_status.DETAILS_KEY, data))
    error = grpc_status.from_rpc_error(AioRpcError(grpc.StatusCode.ABORTED, Metadata(), trailers, "x"))
    assert error.reason in Reason


@given(st.text(max_size=30), st.binary(max_size=30))
def test_an_unknown_reason_of_a_peer_is_not_taken_over(reason: str, rest: bytes) -> None:
    info = error_details_pb2.ErrorInfo(reason=reason, domain="kvgrpc.dev")
    packed = status_pb2.Status(code=10, message="x")
    packed.details.add().Pack(info)
    packed.details.add(type_url="type.googleapis.com/google.rpc.BadRequest", value=rest)
    trailers = Metadata((grpc_status.DETAILS_KEY, packed.SerializeToString()))
    error = grpc_status.from_rpc_error(AioRpcError(grpc.StatusCode.ABORTED, Metadata(), trailers, "x"))
    expected = Reason[reason] if reason in Reason.__members__ else Reason.PEER_FAILED
    assert error.reason is expected
