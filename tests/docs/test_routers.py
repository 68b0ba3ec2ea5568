"""docs/routers.md has the code's RPCs, reasons and next steps, health, numbers, JSON forms, and pictures."""

import json
import re
from pathlib import Path

import pytest
from google.protobuf import json_format

from bench.routers.kinds import MODES, ROUTERS
from kvgrpc.core.moves.failures import NEXT_STEPS
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import BY_CODE, NextStep, Reason
from kvgrpc.integrations.params import Defaults, wanted
from kvgrpc.service import admission
from kvgrpc.service.grpc_status import next_step
from kvgrpc.service.rpc import health, server
from kvgrpc.service.watchers import WATCHES_OF_CONNECTION_MAX
from kvgrpc.v1 import common_pb2, handshake_pb2
from tests.docs import reasons
from tests.docs.pages import DOCS, ROOT, code, plain, section, tables
from tests.docs.schema import requests

PAGE = DOCS / "routers.md"
PICTURES = sorted(DOCS.glob("router-*.svg"))
RPCS = requests().keys()
NOT_RPCS = {"MessagePack", "OpenAI", "TypeScript", "XpYd", "ZeroMQ"}
"""Words with two capitals that are not RPCs."""


def words_of_two_capitals(text: str) -> set[str]:
    return set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w*", text))


def test_every_rpc_that_is_named_exists() -> None:
    prose = re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE))
    messages = {message for file in (common_pb2,) for message in file.DESCRIPTOR.message_types_by_name}
    assert words_of_two_capitals(prose) - RPCS - messages - NOT_RPCS == set()
    assert {"CancelTransfer", "WatchEngine", "PullBlocks", "RegisterPush"} <= words_of_two_capitals(prose)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_pictures_name_rpcs_that_exist_and_are_on_the_page(picture: Path) -> None:
    assert words_of_two_capitals(picture.read_text()) <= RPCS
    assert f"]({picture.name})" in PAGE.read_text()


def test_there_is_a_picture_for_each_sequence() -> None:
    assert [picture.stem for picture in PICTURES] == ["router-cancel", "router-failure", "router-pull", "router-push"]


def test_the_matrix_has_each_router_and_each_mode_that_is_run() -> None:
    text = section(PAGE, "## Routers that were run")
    (rows,) = tables(text)
    assert [row[:2] for row in rows] == [[router.name, router.legs] for router in ROUTERS]
    assert {len(row) for row in rows} == {2 + len(MODES)}
    assert f"| Router | Legs | {' | '.join(f'`{mode}`' for mode in MODES)} |" in text


def test_every_next_step_is_explained() -> None:
    steps, _ = tables(section(PAGE, "## What a failure says"))
    assert [plain(row[0]) for row in steps[:-1]] == [step.value for step in NextStep]


@pytest.mark.parametrize("row", tables(section(PAGE, "## What a failure says"))[1], ids=lambda row: plain(row[0]))
def test_reasons_come_with_the_next_step_that_is_shown(row: list[str]) -> None:
    """The next step is the same in a call's refusal and in a transfer's failure."""
    reason, shown = Reason(plain(row[0])), NextStep(plain(row[1]))
    said = {next_step(BY_CODE[code](reason, "no")) for code in reasons.codes().get(reason.value, ())}
    if reason in NEXT_STEPS:
        said.add(NextStep(NEXT_STEPS[reason].name))
    assert said == {shown}


def test_every_reason_on_the_page_is_one_that_is_sent() -> None:
    names = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", PAGE.read_text()))
    others = {step.value for step in NextStep} | {"INVALID_FIELD", "DEADLINE_EXCEEDED"}
    enums = {value.name for enum in common_pb2.DESCRIPTOR.enum_types_by_name.values() for value in enum.values}
    assert {name for name in names if not name.startswith("NOT_")} - others - enums <= reasons.sent()


def test_health_is_explained_for_every_service() -> None:
    (rows,) = tables(section(PAGE, "## Health"))
    named = [name for row in rows for name in plain(row[0]).split(", ")]
    assert sorted(named) == sorted([*server.SERVICES, "the empty name"])
    handoff = server.SERVICES[1]
    assert handoff == health._TAKES_WORK
    assert plain(rows[0][0]) == handoff


def test_only_an_overloaded_server_serves_all_though_it_is_not_open() -> None:
    assert set(admission.TAKES_WORK) == {handshake_pb2.ADMISSION_OPEN, handshake_pb2.ADMISSION_OVERLOADED}
    assert set(admission.BROKEN) == {handshake_pb2.ADMISSION_NO_ENGINE, handshake_pb2.ADMISSION_WEDGED}


def test_pings_and_waits_are_bounded_as_it_says() -> None:
    text = section(PAGE, "## Connections")
    (interval_ms,) = re.findall(r"min_ping_interval_without_data_ms\", (\d+)", Path(str(server.__file__)).read_text())
    assert f"ping every {int(interval_ms) / 1000:g} s while no data flows" in " ".join(text.split())
    assert f"at most {Limits().wait_s:.0f} seconds" in text
    assert f"at most {WATCHES_OF_CONNECTION_MAX} watches" in text


def test_settings_that_are_named_exist() -> None:
    assert "peer_grace_s" in (DOCS / "router-failure.svg").read_text()
    assert Limits().peer_grace_s
    assert Limits().registration_timeout_s


def test_what_is_to_be_relayed_is_read_by_engines() -> None:
    to_p, to_d = (json.loads(text) for text in code(section(PAGE, "## What to relay"), "json"))
    given = wanted("r", [1, 2, 3], to_p, Defaults())
    assert given is not None
    assert given.give is not None
    taken = wanted("r", [1, 2, 3], to_d, Defaults())
    assert taken is not None
    assert taken.take is not None
    for params in (to_p, to_d):
        intent = json_format.ParseDict(params["kvgrpc_intent"], common_pb2.Intent())
        assert len(intent.transfer_key) == 16


def test_what_is_to_be_generated_is_what_the_clients_generate() -> None:
    rows = {row[0]: row for row in tables(section(PAGE, "## Generated code"))[0]}
    assert plain(rows["Go"][2]) in (ROOT / "buf.gen.yaml").read_text()
    (typescript,) = (ROOT / "clients" / "typescript").glob("buf.gen.yaml")
    for option in plain(rows["TypeScript"][2]).split(", "):
        assert option in typescript.read_text()
