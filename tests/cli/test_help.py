"""What the command line says of itself: help, and the scripts of shells."""

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvgrpc.cli.app import app

LIGHT = {"annotated_doc", "click", "kvgrpc", "shellingham", "typer", "typing_extensions"}
"""Packages that the command line may load before a command runs: itself, and typer with what that loads."""
COMMANDS = [info.callback.__name__.replace("_", "-") for info in app.registered_commands if info.callback is not None]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_begins_with_an_example(command: str) -> None:
    lines = CliRunner(env={"COLUMNS": "120"}).invoke(app, [command, "--help"], prog_name="kvgrpc").stdout.splitlines()
    said = [line.strip() for line in lines if line.strip()]
    assert said[0].startswith("Usage: ")
    assert said[1].startswith("Example: ")
    assert f"kvgrpc {command}" in said[1]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_flag_takes_no_value_and_is_negated_once(command: str) -> None:
    said = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*command.split(), "--help"], prog_name="kvgrpc").stdout
    assert "bool" not in said.lower()
    assert "--no-no-" not in said
    rows = [line for line in said.splitlines() if "--no-" in line and "--no-pool" not in line]
    assert [row for row in rows if not re.search(r"--([a-z-]+) +--no-\1 +[A-Z]", row)] == []
    assert len(rows) == {"serve": 5, "fleet": 1}.get(command, 0)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"serve", "fleet", "top", "completion"}))
def test_what_a_command_says_can_be_had_as_json(command: str) -> None:
    said = CliRunner(env={"COLUMNS": "160"}).invoke(app, [command, "--help"], prog_name="kvgrpc").stdout
    assert re.search(r"--json|--output .*json", said)


@pytest.mark.parametrize("program", [["bench", "pull"], ["sim"], ["examples.demo"]])
def test_a_flag_of_the_other_programs_takes_no_value_either(program: list[str]) -> None:
    command = [sys.executable, "-m", *program, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "160"})
    assert "Usage" in done.stdout
    assert "bool" not in done.stdout.lower()


def test_paragraphs_of_help_are_as_wide_as_the_terminal() -> None:
    said = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["doctor", "--help"], prog_name="kvgrpc").stdout
    assert "in the way of moving KV" in said


def test_the_list_of_commands_has_what_each_one_does() -> None:
    assert "Example:" not in CliRunner().invoke(app, ["--help"]).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_and_with_it_the_names_of_commands(shell: str) -> None:
    script = CliRunner().invoke(app, ["completion", shell]).stdout
    assert f"_KVGRPC_COMPLETE=complete_{shell}" in script
    asked = {
        "bash": {"COMP_WORDS": "kvgrpc sta", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "kvgrpc sta"},
        "fish": {"_TYPER_COMPLETE_ARGS": "kvgrpc sta", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    run = "import sys; sys.argv = ['kvgrpc']; from kvgrpc.cli import main; main()"
    env = os.environ | asked | {"_KVGRPC_COMPLETE": f"complete_{shell}"}
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False, env=env)
    assert "status" in done.stdout


def test_the_command_line_starts_without_what_servers_need() -> None:
    """Processor time depends on the machine, so packages are compared: most of it goes into them."""
    loads = "import sys; before = set(sys.modules); import kvgrpc.cli.app; new = set(sys.modules) - before"
    packages = "{name.partition('.')[0] for name in new} - sys.stdlib_module_names"
    done = subprocess.run(
        [sys.executable, "-c", f"{loads}; print(*({packages}))"], capture_output=True, text=True, check=False
    )
    assert {"kvgrpc", "typer"} <= set(done.stdout.split()) <= LIGHT
