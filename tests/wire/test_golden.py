"""The encoding of the public messages stays as it was when the schema was frozen."""

import json
from typing import Any

import pytest
from google.protobuf.descriptor_pool import Default
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass

from tests.wire.golden import PUBLIC, VECTORS, examples

CASES: list[dict[str, Any]] = json.loads(VECTORS.read_text())["cases"]


def kind(case: dict[str, Any]) -> Any:
    return GetMessageClass(Default().FindMessageTypeByName(case["name"].partition(" ")[0]))


def test_messages_read_as_they_did(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case["name"]):
            read = kind(case).FromString(bytes.fromhex(case["message"]))
            assert MessageToDict(read) == case["json"]


def test_messages_are_written_as_they_were(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case["name"]):
            made = ParseDict(case["json"], kind(case)())
            assert made.SerializeToString(deterministic=True).hex() == case["message"]


def test_every_message_and_choice_has_a_case() -> None:
    """`python -m tests.wire.golden` adds missing cases."""
    assert {name for name, _ in examples(PUBLIC)} <= {case["name"] for case in CASES}
