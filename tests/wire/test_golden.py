"""The encoding of the public messages stays as it was when the schema was frozen."""

import json
from typing import Any

import pytest
from google.protobuf.descriptor_pool import Default
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass

from tests.wire.golden import PUBLIC, VECTORS, examples

CASES: list[dict[str, Any]] = json.loads(VECTORS.read_text())["cases"]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])


def kind(case: dict[str, Any]) -> Any:
    return GetMessageClass(Default().FindMessageTypeByName(case["name"].partition(" ")[0]))


@EVERY_CASE
def test_a_message_reads_as_it_did(case: dict[str, Any]) -> None:
    read = kind(case).FromString(bytes.fromhex(case["message"]))
    assert MessageToDict(read) == case["json"]


@EVERY_CASE
def test_a_message_is_written_as_it_was(case: dict[str, Any]) -> None:
    made = ParseDict(case["json"], kind(case)())
    assert made.SerializeToString(deterministic=True).hex() == case["message"]


def test_every_message_and_choice_has_a_case() -> None:
    """`python -m tests.wire.golden` adds missing cases."""
    assert {name for name, _ in examples(PUBLIC)} <= {case["name"] for case in CASES}
