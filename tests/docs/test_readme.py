"""README and docs/api.md: their programs run, and their tables are those of the schema."""

import json
import re
import subprocess
import sys

import pytest
from google.protobuf import json_format, message_factory

from kvgrpc.service.rpc.server import SERVICES
from tests.docs.pages import DOCS, README, ROOT, code, plain, section, tables
from tests.docs.schema import requests, services

API = DOCS / "api.md"


@pytest.mark.parametrize("heading", ["## A session", "## Tensors by their names"])
def test_programs_run_as_written_and_say_what_is_written(heading: str) -> None:
    text = section(README, heading)
    (program,), (expected,) = code(text, "python"), code(text, "text")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == (expected, "")


def test_the_session_has_about_ten_lines() -> None:
    (program,) = code(section(README, "## A session"), "python")
    assert len([line for line in program.splitlines() if line]) <= 12


def test_the_table_of_rpcs_is_that_of_the_schema() -> None:
    rows = tables(section(API, "## RPCs"))[0]
    shown = {plain(service): rpcs.split(", ") for service, rpcs, _ in rows}
    assert shown == {name: [rpc.name for rpc in service.methods] for name, service in services().items()}


def test_the_picture_names_rpcs_that_exist() -> None:
    """Every camel-case word in the picture is the name of an RPC, or of a call between leads."""
    words = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w*", (DOCS / "pull.svg").read_text()))
    assert words
    assert words - requests().keys() == set()


def test_services_that_are_not_served_are_marked_so() -> None:
    rows = tables(section(API, "## RPCs"))[0]
    assert {plain(row[0]) for row in rows if "not served" not in row[2]} == set(SERVICES)


def test_the_grpcurl_lines_name_rpcs_and_fields_that_exist() -> None:
    lines = code(section(API, "## RPCs"), "console")[0].splitlines()
    assert len(lines) == 3
    for line in lines:
        service, slash, rpc = line.split()[-1].partition("/")
        if not slash:
            assert service == "list"
            continue
        request = services()[service].methods_by_name[rpc].input_type
        body = line.split("'")[1] if "'" in line else "{}"
        json_format.ParseDict(json.loads(body), message_factory.GetMessageClass(request)())


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ": " in line}
    commands = [
        line.split("#")[0].split() for line in code(section(README, "## Two commands"), "console")[0].splitlines()
    ]
    assert commands == [["make", "demo"], ["make", "test"]]
    assert {"demo", "test"} <= targets
