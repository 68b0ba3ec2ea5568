"""Whatever a file, the environment or flags say: it is a configuration, or refused in one line."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvgrpc.config import TABLES, Config
from kvgrpc.config_sources import FILE_BYTES_MAX, load
from kvgrpc.errors import InvalidRequest


def toml(value: Any) -> str:
    """As TOML, but for values that it does not have."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(str(key))} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value)
    return str(value).lower()


def loaded_or_refused(path: Path | None, environment: dict[str, str], flags: dict[str, Any]) -> None:
    """Either a configuration, or one line that says why not."""
    refusal = ""
    try:
        load(path, environment, flags)
    except InvalidRequest as error:
        refusal = str(error)
    assert refusal.isprintable()
    assert len(refusal) < LINE_CHARS_MAX


LINE_CHARS_MAX = 3_000
"""Of a refusal: it may list all settings."""
NUMBER = "7" * 5_000
HUGE = {
    "lists in lists": "dial_allow = " + "[" * 100_000,
    "tables in tables": "pool = " + "{a = " * 100_000,
    "a name of many parts": ".".join(["pool"] * 5_000) + " = 1",
    "a table of many parts": f"[{'.'.join(['pool'] * 5_000)}]",
    "a number of many digits": f"copy_threads = {NUMBER}",
    "a number of many digits in a table": f"[pool]\ndtype = 0x{NUMBER}",
    "a list with a number of many digits": f"dial_allow = [0x{NUMBER}]",
    "a list that goes deep": f"[pool]\ndtype = {'[' * 300}{']' * 300}",
    "a list of many": f"listen = [{'1,' * 100_000}]",
    "a name of many lines": '"' + "a\\n" * 100_000 + '" = 1',
    "a text of many lines": 'engine_id = "' + "a\\n" * 100_000 + '"',
    "a text of nothing": 'session_socket = "/tmp/\\u0000"',
    "a file without end": "# " + "a" * FILE_BYTES_MAX,
    "a store of many bytes": f"[tensors]\nstore_bytes = 0x{'7' * 3_000}",
    "a page of many bytes": f"[tensors]\npage_bytes = 0x{'7' * 3_000}",
}


@pytest.mark.parametrize("case", HUGE)
def test_a_file_is_refused_in_one_line_however_deep_or_long_it_is(tmp_path: Path, case: str) -> None:
    path = tmp_path / "kvgrpc.toml"
    path.write_text(HUGE[case])
    with pytest.raises(InvalidRequest) as caught:
        load(path, {}, {})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < LINE_CHARS_MAX


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem", "a\0b", "x" * 5_000], ids=ascii)
def test_what_is_no_file_is_refused_in_one_line(path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(Path(path), {}, {})
    assert str(caught.value).isprintable()


TEXTS = st.text(max_size=20) | st.sampled_from(["shm", "cuda:0", "127.0.0.1:1", "no", "cuda:0\n"])
NUMBERS = st.integers() | st.integers(-(1 << 80), 1 << 80) | st.floats() | st.just(10**400)
SCALARS = TEXTS | NUMBERS | st.booleans() | st.none() | st.datetimes()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
VARIABLES = [f"KVGRPC_{item.name.upper()}" for item in fields(Config)] + [
    f"KVGRPC_{table}_{item.name}".upper() for table, kind in TABLES.items() for item in fields(kind)
]
ENVIRONMENT_CHARS = st.characters(exclude_characters="\0", exclude_categories=[]) | st.sampled_from("\udc80\udcff")
KEYS = {table: [item.name for item in fields(kind)] for table, kind in TABLES.items()}
TABLE = st.sampled_from(sorted(KEYS)).flatmap(
    lambda table: st.tuples(st.just(table), st.dictionaries(st.sampled_from(KEYS[table]) | st.text(), VALUES))
)
SETTING = st.tuples(st.sampled_from([item.name for item in fields(Config)]) | st.text(), VALUES) | TABLE


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_configuration_or_are_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(data)
    loaded_or_refused(path, {}, {})


@given(settings=st.lists(SETTING, max_size=3).map(dict))
def test_any_settings_are_a_configuration_or_are_refused_in_one_line(settings: dict[str, Any]) -> None:
    loaded_or_refused(None, {}, settings)


@given(settings=st.lists(SETTING, max_size=3).map(dict))
def test_any_file_of_settings_is_a_configuration_or_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "settings.toml"
    path.write_text("\n".join(f"{toml(key)} = {toml(value)}" for key, value in settings.items()), errors="replace")
    loaded_or_refused(path, {}, {})


@given(
    environment=st.dictionaries(
        st.sampled_from(VARIABLES) | st.text(ENVIRONMENT_CHARS, max_size=20).map("KVGRPC_{}".format),
        st.text(ENVIRONMENT_CHARS, max_size=40) | st.sampled_from(["1", "no", "1e9", NUMBER, NUMBER[:4_000], "shm"]),
        max_size=3,
    )
)
def test_any_environment_is_a_configuration_or_is_refused_in_one_line(environment: dict[str, str]) -> None:
    loaded_or_refused(None, environment, {})
