"""The JSON form of an Intent is Protobuf's own mapping, which every language has already."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, Parse, ParseDict, ParseError

from kvgrpc.v1.common_pb2 import Intent

VECTORS = Path(__file__).parents[2] / "proto" / "vectors" / "intent.json"
CASES: list[dict[str, Any]] = json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])


@EVERY_CASE
def test_an_intent_is_written_as_the_vectors_say(case: dict[str, Any]) -> None:
    assert MessageToDict(Intent.FromString(bytes.fromhex(case["message"]))) == case["kvgrpc_intent"]


@EVERY_CASE
def test_an_intent_is_read_as_the_vectors_say(case: dict[str, Any]) -> None:
    read = Parse(json.dumps(case["kvgrpc_intent"]), Intent())
    assert read.SerializeToString(deterministic=True).hex() == case["message"]


def test_the_vectors_have_every_field() -> None:
    written = {name for case in CASES for name in case["kvgrpc_intent"]}
    assert written == {field.json_name for field in Intent.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    "wrong", [{"transferKey": "not base64!"}, {"ttl": 30}, {"mode": "PULL"}, {"consumerCount": -1}, {"peer": "host:1"}]
)
def test_what_is_no_intent_is_refused(wrong: Any) -> None:
    with pytest.raises(ParseError):
        ParseDict(wrong, Intent())
