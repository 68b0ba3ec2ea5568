"""docs/configuration.md has the settings, flags, defaults and exit codes of the code."""

import inspect
import tomllib
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

from kvgrpc import config
from kvgrpc.cli import serve
from kvgrpc.config import DTYPE_BYTES, Config, PoolConfig, SchedulerConfig, TensorsConfig
from kvgrpc.config_fleet import FleetConfig
from kvgrpc.config_security import TOKEN_ALGORITHMS, IdentityConfig, TlsConfig, TokenConfig
from kvgrpc.config_sources import RELOADED, RELOADED_LIMITS, load
from kvgrpc.service.polling import IN_PLACE, VARIABLE
from kvgrpc.service.session.session_server import FIRST_ENGINE_S
from tests.docs.pages import DOCS, ROOT, code, plain, section, tables

PAGE = DOCS / "configuration.md"
SETTINGS, POOL, SCHEDULER, TENSORS, TLS, IDENTITY, TOKENS, FLEET, VARIABLES = tables(section(PAGE, "## Settings"))
NOT_A_VALUE = {
    "engine_id": "random",
    "pool": "see below",
    "scheduler": "see below",
    "tensors": "see below",
    "tls": "see below",
    "identity": "see below",
    "tokens": "see below",
    "fleet": "see below",
    "limits": "[table](protocol.md#defaults-and-limits)",
}


def shown(rows: list[list[str]]) -> dict[str, str]:
    return {plain(name): plain(default) for name, default, _ in rows}


def rendered(field: Field[Any]) -> str:
    """Returns a default as the page writes it."""
    if field.name in NOT_A_VALUE:
        return NOT_A_VALUE[field.name]
    assert field.default is not MISSING
    match field.default:
        case None | "" | ():
            return "none"
        case bool(value):
            return "yes" if value else "no"
        case tuple(values):
            return ",".join(values)
        case value:
            return f"{value:g}" if isinstance(value, float) else str(value)


def test_settings_and_their_defaults_are_those_of_the_configuration() -> None:
    assert shown(SETTINGS) == {field.name: rendered(field) for field in fields(Config)}


def test_settings_that_reload_are_marked() -> None:
    assert {plain(name) for name, _, text in SETTINGS if "[Reloads](#reload)" in text} == set(RELOADED)
    (limits,) = (text for name, _, text in SETTINGS if plain(name) == "limits")
    assert f"{' and '.join(f'`{name}`' for name in RELOADED_LIMITS)} of them [reload](#reload)" in limits


def test_keys_of_the_pool_and_their_defaults_are_those_of_the_configuration() -> None:
    assert shown(POOL) == {field.name: rendered(field) for field in fields(PoolConfig)}


def test_keys_of_the_scheduler_and_their_defaults_are_those_of_the_configuration() -> None:
    assert shown(SCHEDULER) == {field.name: rendered(field) for field in fields(SchedulerConfig)}


def test_keys_of_the_store_of_tensors_and_their_defaults_are_those_of_the_configuration() -> None:
    assert shown(TENSORS) == {field.name: rendered(field) for field in fields(TensorsConfig)}


def test_keys_of_tls_and_their_defaults_are_those_of_the_configuration() -> None:
    assert shown(TLS) == {field.name: rendered(field) for field in fields(TlsConfig)}


def test_keys_of_identity_and_tokens_and_their_defaults_are_those_of_the_configuration() -> None:
    for rows, kind in ((IDENTITY, IdentityConfig), (TOKENS, TokenConfig)):
        assert shown(rows) == {field.name: rendered(field) for field in fields(kind)}


def test_keys_of_the_fleet_and_their_defaults_are_those_of_the_configuration() -> None:
    assert shown(FLEET) == {field.name: rendered(field) for field in fields(FleetConfig)}


def test_the_algorithms_of_tokens_are_all_named() -> None:
    (row,) = (row for row in TOKENS if plain(row[0]) == "algorithms")
    assert row[2].partition(": ")[2].split(", ") == list(TOKEN_ALGORITHMS)


def test_the_element_types_are_all_named() -> None:
    (row,) = (row for row in POOL if plain(row[0]) == "dtype")
    assert row[2].partition(": ")[2].split(", ") == list(DTYPE_BYTES)


def test_every_flag_is_a_setting_or_named_as_one_without() -> None:
    flags = set(inspect.signature(serve.serve).parameters)
    settings = shown(SETTINGS).keys() - {"pool", "scheduler", "tensors", "tls", "identity", "tokens", "fleet", "limits"}
    without = flags - settings - shown(POOL).keys()
    assert settings | shown(POOL).keys() <= flags
    text = section(PAGE, "## Settings")
    (sentence,) = (part for part in text.split("\n\n") if part.startswith("Flags without a setting"))
    assert without == {
        word.strip("`,").removeprefix("--").replace("-", "_") for word in sentence.split() if "--" in word
    } - {"listen"}


def test_the_example_can_be_used_as_it_is(tmp_path: Path) -> None:
    (example,) = code(section(PAGE, "## Settings"), "toml")
    path = tmp_path / "kvgrpc.toml"
    path.write_text(example)
    made, written = load(path, {}, {}), tomllib.loads(example)
    assert made.engine_id == written["engine_id"]
    assert made.data_paths == tuple(written["data_paths"])
    assert made.pool is not None
    assert made.pool.blocks == written["pool"]["blocks"]
    assert made.scheduler.on_loss == written["scheduler"]["on_loss"]
    assert made.limits.lease_ttl_s == written["limits"]["lease_ttl_s"]


def test_the_later_source_wins(tmp_path: Path) -> None:
    path = tmp_path / "kvgrpc.toml"
    path.write_text('engine_id = "file"\ndata_paths = ["shm"]\nread_blocks = true')
    made = load(path, {"KVGRPC_ENGINE_ID": "environment", "KVGRPC_DATA_PATHS": "cma,nixl"}, {"engine_id": "flag"})
    assert (made.engine_id, made.data_paths, made.read_blocks) == ("flag", ("cma", "nixl"), True)


def test_exit_codes_are_those_of_the_command() -> None:
    (rows,) = tables(section(PAGE, "## Exit codes"))
    assert [int(row[0]) for row in rows] == [0, 1, serve.EXIT_CONFIG, serve.EXIT_BIND, serve.EXIT_POOL]


def test_the_other_variables_are_read_somewhere() -> None:
    """Only UCX reads UCX_NET_DEVICES; the data path's description contains its name."""
    texts = [path.read_text() for folder in ("kvgrpc", "bench") for path in (ROOT / folder).rglob("*.py")]
    names = [name for row in VARIABLES for name in plain(row[0]).split(", ")]
    assert [name for name in names if not any(name in text for text in texts)] == []


def test_the_wait_for_the_first_engine_is_as_long_as_it_says() -> None:
    (row,) = (row for row in SETTINGS if plain(row[0]) == "exit_with_engine")
    assert f"within {FIRST_ENGINE_S:g} s" in row[2]


@pytest.mark.parametrize(
    ("setting", "bound"),
    [("engine_id", config.NAMES_BYTES_MAX), ("session_socket", config.SOCKET_PATH_BYTES_MAX)],
)
def test_bounds_of_settings_are_as_it_says(setting: str, bound: int) -> None:
    (row,) = (row for row in SETTINGS if plain(row[0]) == setting)
    assert f"at most {bound} bytes" in row[2]


def test_environment_names_are_formed_as_it_says() -> None:
    assert "KVGRPC_DATA_PATHS" in section(PAGE, "## Settings")
    assert load(None, {"KVGRPC_DATA_PATHS": "shm"}, {}).data_paths == ("shm",)


def test_what_a_server_sets_of_grpc_is_what_the_page_says() -> None:
    (says,) = (effect for name, effect in VARIABLES if plain(name) == VARIABLE)
    assert f"`{IN_PLACE}`" in says
