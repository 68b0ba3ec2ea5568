"""Messages of every release are read and written as they were when they were kept."""

from typing import Any

import pytest
from google.protobuf.descriptor_pool import Default
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass

from tests.wire.golden import PEER_CASES, PUBLIC_CASES, Golden
from tests.wire.spoken import SPOKEN, Spoken

CASES = [case for golden in (PUBLIC_CASES, PEER_CASES) for case in golden.cases()]


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


@pytest.mark.parametrize("golden", [PUBLIC_CASES, PEER_CASES], ids=lambda golden: golden.path.name)
def test_every_message_and_choice_has_a_case(golden: Golden) -> None:
    """`python -m tests.wire.golden` adds missing cases."""
    assert {name for name, _ in golden.make()} <= {case["name"] for case in golden.cases()}


@pytest.mark.parametrize("spoken", SPOKEN, ids=lambda spoken: f"{spoken.make().DESCRIPTOR.name} {spoken.name}")
def test_a_lead_takes_all_that_a_lead_of_an_earlier_release_says(spoken: Spoken) -> None:
    name = f"{spoken.make().DESCRIPTOR.full_name} {spoken.name}"
    (case,) = [case for case in PEER_CASES.cases() if case["name"] == name]
    kept = kind(case).FromString(bytes.fromhex(case["message"]))
    assert spoken.again(kept) == kept
