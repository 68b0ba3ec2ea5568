"""docs/protocol.md has the numbers, reasons and encodings of the code."""

import hashlib
import hmac
import importlib
import json
import math
import re
from dataclasses import fields
from typing import Any

import pytest

from kvgrpc.core.moves import moves, pending_closes
from kvgrpc.core.moves.failures import NEXT_STEPS
from kvgrpc.core.values import grants, limits
from kvgrpc.core.values.content import DIGEST_BYTES, chain
from kvgrpc.core.values.ids import mint_lease_id
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Reason
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import transfer_pb2
from kvgrpc.wire.fields import TABLE, BoundKind
from tests.docs import reasons
from tests.docs.pages import DOCS, ROOT, code, plain, section, tables
from tests.docs.schema import requests

PAGE = DOCS / "protocol.md"


def table(heading: str, number: int = 0) -> list[list[str]]:
    return [[plain(cell) for cell in row] for row in tables(section(PAGE, heading))[number]]


def test_the_defaults_are_those_of_limits() -> None:
    shown = {name: value for name, value, _ in table("## Defaults and limits")}
    assert shown == {field.name: f"{getattr(Limits(), field.name):.12g}" for field in fields(Limits)}


def test_the_other_bounds_are_those_of_their_constants() -> None:
    def value(path: str) -> str:
        module, _, name = path.rpartition(".")
        return f"{getattr(importlib.import_module(module), name, math.nan):.12g}"

    rows = table("## Defaults and limits", 1)
    assert [(path, shown) for _, shown, path in rows if shown != value(path)] == []


def test_the_bounds_of_fields_are_those_of_their_table() -> None:
    rows = [
        [", ".join(row.fields.split()), "—" if row.kind is BoundKind.FREE else str(row.most), row.kind.value]
        for row in TABLE
    ]
    assert table("### Fields of messages") == rows


def test_the_wire_version_is_the_one_that_is_spoken() -> None:
    assert f"The wire protocol has version {limits.PROTOCOL_MAX}." in PAGE.read_text()
    assert limits.PROTOCOL_MIN == limits.PROTOCOL_MAX


def test_every_reason_has_a_row_in_the_order_of_the_schema() -> None:
    assert [row[0] for row in table("## Errors", 1)] == list(Reason)


def test_each_reason_has_the_codes_that_it_is_raised_with() -> None:
    said = {reason: set(shown.split(", ")) for reason, shown, _ in table("## Errors", 1)}
    expected = {
        reason: reasons.codes().get(reason, {"—"}) if reason in reasons.sent() else {"*reserved*"} for reason in said
    }
    assert said == expected


def test_what_would_help_is_what_the_core_says() -> None:
    shown = {step: names.split(", ") for step, names in table("## Errors", 2)}
    assert shown.pop("RECOMPUTE") == ["all others"]
    assert shown == {
        step: sorted(reason for reason, next_ in NEXT_STEPS.items() if next_.name == step)
        for step in {next_.name for next_ in NEXT_STEPS.values()}
    }


def test_retries_between_leads_are_as_often_as_it_says() -> None:
    shown = {row[0]: row[1] for row in table("## Retries")}
    assert f"every {moves.RETRY_DELAY_S:g} s" in shown["OpenAccess"]
    assert f"every {moves.RETRY_DELAY_S:g} s" in shown["SettleAccess"]
    assert f"every {pending_closes.RETRY_DELAY_S:g} s" in shown["CloseAccess"]


def test_calls_with_an_idempotency_key_are_those_of_the_schema() -> None:
    shown = {rpc: key for rpcs, key in table("## Idempotency") for rpc in rpcs.split(", ")}
    rpcs = requests()
    assert shown.keys() <= rpcs.keys()
    keyed = {name for name, request in rpcs.items() if "idempotency_key" in request.fields_by_name}
    assert {rpc for rpc, key in shown.items() if key == "idempotency_key"} == keyed


def test_cancel_outcomes_are_those_of_the_schema() -> None:
    names = [value.name.removeprefix("CANCEL_OUTCOME_") for value in transfer_pb2.CancelOutcome.DESCRIPTOR.values]
    assert [row[0] for row in table("## Cancelling")] == names[1:]


@pytest.mark.parametrize(("number", "frame"), [(0, session_pb2.ClientFrame), (1, session_pb2.ServerFrame)])
def test_session_frames_are_those_of_the_schema(number: int, frame: Any) -> None:
    assert [row[0] for row in table("## Sessions", number)] == [field.name for field in frame.DESCRIPTOR.fields]


def test_a_scheduler_may_mint_lease_ids_and_grant_keys_as_it_says() -> None:
    text = section(PAGE, "## Sessions")
    assert "`lease|engine|` n" in text
    assert "`kvgrpc grant key v1`" in text
    secret = b"s" * 32
    digest = hmac.new(secret, b"lease|engine|7", hashlib.sha256).hexdigest()
    assert mint_lease_id(secret, 0xAB, "engine", 7) == f"l-{0xAB:016x}-{digest[:32]}"
    assert grants.signing_key(secret) == hmac.new(secret, b"kvgrpc grant key v1", hashlib.sha256).digest()


def test_the_digests_are_those_of_the_chain() -> None:
    def lp(field: bytes) -> bytes:
        return len(field).to_bytes(4, "little") + field

    made = chain(range(20)).digests
    assert dict(table("## Contents of blocks")) == {
        "h_0": hashlib.sha256(lp(b"kvgrpc content v1") + 3 * lp(b"")).hexdigest(),
        "h_1": made[:DIGEST_BYTES].hex(),
        "h_2": made[DIGEST_BYTES:].hex(),
    }


def test_the_grant_in_json_is_one_of_the_vectors_and_its_fields_are_explained() -> None:
    shown = json.loads(code(section(PAGE, "## Grants"), "json")[0])
    vectors = json.loads((ROOT / "proto" / "vectors" / "grant.json").read_text())["cases"]
    assert shown in [case["kv_transfer_params"] for case in vectors]
    assert grants.to_json(grants.from_json(shown)) == shown
    explained = [name for row in table("## Grants") for name in row[0].split(", ")]
    assert sorted(explained) == sorted(shown)


def test_the_intent_in_json_is_one_of_the_vectors() -> None:
    _, text = code(section(PAGE, "## Grants"), "json")
    vectors = json.loads((ROOT / "proto" / "vectors" / "intent.json").read_text())["cases"]
    assert json.loads(text) in [case["kvgrpc_intent"] for case in vectors]


def test_the_contents_list_every_section() -> None:
    text = PAGE.read_text()
    listed = re.findall(r"\[[^\]]+\]\(#([\w-]+)\)", text.partition("\n## ")[0])
    assert listed == [title.lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", text, re.MULTILINE)]
