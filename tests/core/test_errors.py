"""The error tree has one class for each gRPC code, and one reason for each that the protocol names."""

import pytest

from kvgrpc import errors
from kvgrpc.errors import BY_CODE, FieldViolation, KVGrpcError, OutOfRange, Reason
from kvgrpc.v1 import common_pb2

KINDS = [kind for kind in KVGrpcError.__subclasses__() if kind.__module__ == errors.__name__]
"""Error classes of `kvgrpc.errors`; other layers' classes exist only if something imported them."""


def test_the_reasons_are_those_of_the_protocol() -> None:
    wire = [value.name.removeprefix("FAILURE_REASON_") for value in common_pb2.FailureReason.DESCRIPTOR.values]
    assert ["UNSPECIFIED", *(reason.value for reason in Reason)] == wire
    assert [reason for reason in Reason if reason.name != reason.value] == []


def test_the_tree_has_one_level() -> None:
    assert {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVGrpcError)} == {
        KVGrpcError,
        *KINDS,
    }
    assert {kind.__bases__ for kind in KINDS} == {(KVGrpcError,)}


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [vars(kind)["code"] for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert KVGrpcError.code not in codes


def test_the_class_of_every_code_is_found() -> None:
    assert {kind.code: kind for kind in KINDS} == BY_CODE


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_is_drawn_in_the_tree(kind: type[KVGrpcError]) -> None:
    assert errors.__doc__ is not None
    assert f"── {kind.__name__} " in errors.__doc__


def test_an_error_says_its_reason_and_every_violation() -> None:
    error = OutOfRange(
        Reason.BLOCK_OUT_OF_RANGE,
        "two ids are wrong",
        violations=(FieldViolation("a[0]", "is 7 of 4"), FieldViolation("b", "is missing")),
        retry_delay_s=0.5,
        metadata={"phase": "open"},
    )
    assert str(error) == "BLOCK_OUT_OF_RANGE: two ids are wrong; a[0]: is 7 of 4; b: is missing"
    assert (error.message, error.retry_delay_s, error.metadata) == ("two ids are wrong", 0.5, {"phase": "open"})


def test_an_error_needs_no_more_than_a_reason_and_a_sentence() -> None:
    error = KVGrpcError(Reason.INTERNAL, "it broke")
    assert str(error) == "INTERNAL: it broke"
    assert (error.violations, error.retry_delay_s, error.metadata) == ((), None, {})
