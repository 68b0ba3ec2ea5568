"""The C library passes its own tests, which run it under sanitizers, and its numbers are those of the schema."""

import re

import pytest

from kvgrpc.v1 import common_pb2, pool_types_pb2
from tests.clients.native.builds import ROOT, build, need, run
from tests.clients.native.library import HEADER, library

pytestmark = pytest.mark.timeout(900)
HEADER_TEXT = (ROOT / HEADER).read_text()


def numbers(prefix: str) -> dict[str, int]:
    """Returns the enumerators of the header that begin with a prefix."""
    found = re.findall(rf"\b{prefix}(\w+) = (\d+)", HEADER_TEXT)
    assert found
    return {name: int(value) for name, value in found}


def test_the_library_passes_its_tests_under_sanitizers() -> None:
    need("ctest")
    made = build("clients/c")
    run("ctest", "--test-dir", str(made), "--output-on-failure", timeout_s=300.0)


def test_reasons_are_those_of_the_schema() -> None:
    reasons = common_pb2.FailureReason
    wanted = [name.removeprefix("FAILURE_REASON_") for name, _ in sorted(reasons.items(), key=lambda row: row[1])]
    assert [library().kvgrpc_reason_name(number).decode() for number in range(len(wanted))] == wanted
    assert library().kvgrpc_reason_name(len(wanted)) == b"UNKNOWN"


def test_reasons_that_the_library_gives_are_those_of_the_schema() -> None:
    text = (ROOT / "clients/c/src/failure.h").read_text()
    given = re.findall(r"\bKV_(\w+) = (\d+)", text)
    assert len(given) > 8
    assert {name: int(value) for name, value in given} == {
        name: common_pb2.FailureReason.Value(f"FAILURE_REASON_{name}") for name, _ in given
    }


def test_numbers_of_a_pool_are_those_of_the_schema() -> None:
    for prefix, kinds, schema in (
        ("KVGRPC_GROUP_", pool_types_pb2.GroupKind, "GROUP_KIND_"),
        ("KVGRPC_TENSOR_", pool_types_pb2.TensorKind, "TENSOR_KIND_"),
    ):
        wanted = {name.removeprefix(schema): value for name, value in kinds.items() if value}
        assert numbers(prefix) == wanted
    orders = {name.removeprefix("BLOCK_ORDER_"): value for name, value in pool_types_pb2.BlockOrder.items() if value}
    assert {name: numbers("KVGRPC_")[name] for name in orders} == orders


def test_the_library_says_its_version() -> None:
    (version,) = re.findall(r"VERSION (\d\S+) ", (ROOT / "clients/c/CMakeLists.txt").read_text())
    assert library().kvgrpc_engine_version().decode() == version
