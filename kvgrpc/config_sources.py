"""Sources of a configuration: the only reader of files and environment.

Later sources win: defaults, the TOML file, KVGRPC_* variables, flags. A key is the same everywhere: `data_paths` in the
file, KVGRPC_DATA_PATHS in the environment, --data-paths on the command line. Lists are comma-separated outside TOML. A
key of a table is KVGRPC_POOL_LAYERS in the environment.

Any input is a configuration or is refused by InvalidRequest, in one line.

The sources may be read again while the server runs. What changes then is read at each use, and never kept.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvgrpc.config import TABLES, Config
from kvgrpc.config_errors import invalid
from kvgrpc.errors import InvalidRequest

FILE_BYTES_MAX = 256 << 10
"""Maximum size of a configuration file, in bytes."""
_INTEGER_BITS_MAX = 64
"""Maximum size of whole numbers that TOML promises, in bits."""
RELOADED = ("dial_allow", "drain_s", "log_level", "log_format")
"""Settings that change while the server runs. The files of `tls`, `identity` and `tokens` are watched anyway."""
RELOADED_LIMITS = ("wait_s", "request_ttl_s")
"""Limits that change while the server runs. The state of the core has the others."""
_NONE: Mapping[str, Any] = MappingProxyType({})


def load(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any], defaults: Mapping[str, Any] = _NONE
) -> Config:
    """Returns the configuration from file, environment and flags (None: not given). `defaults` hold where no source
    names a setting. Raises InvalidRequest.
    """
    merged = dict(defaults)
    if path is not None:
        try:
            merged |= tomllib.loads(_text(path))
        except (OSError, ValueError, RecursionError) as error:  # numbers of many digits, lists in lists in lists
            raise invalid("config", f"{path}: {error}") from error
    _add_variables(environment, merged)
    merged |= {key: value for key, value in flags.items() if value is not None}
    known = {item.name for item in fields(Config)}
    for key in merged:
        if key not in known:
            raise _unknown(key, known)
    values = {key: _convert(key, value) for key, value in merged.items()}
    return Config(**values)


def _text(path: Path) -> str:
    """Returns the text of the file. Raises OSError or ValueError."""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
    return data.decode()


_PREFIX = "KVGRPC_"
_KUBERNETES = re.compile(
    rf"{_PREFIX}(\w+_)?(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=.*|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.*|PORT=\w+://.*)"
)
"""Pattern of variables that every container gets for a Service named kvgrpc or kvgrpc-something."""


def _add_variables(environment: Mapping[str, str], merged: dict[str, Any]) -> None:
    """Puts the environment's settings over the merged ones. Raises InvalidRequest for an unusable variable."""
    keys = {
        f"{_PREFIX}{table}_{item.name}".upper(): (table, item.name, type(item.default))
        for table, kind in TABLES.items()
        for item in fields(kind)
    }
    settings = {f"{_PREFIX}{item.name.upper()}": item.name for item in fields(Config)}
    # In order of the names, so that KVGRPC_POOL=no comes before the keys of a pool.
    for name, text in sorted(environment.items()):
        if not name.startswith(_PREFIX) or _KUBERNETES.fullmatch(f"{name}={text}"):
            continue
        setting = settings.get(name)
        if name in keys:
            table, key, kind = keys[name]
            there = merged.get(table)
            merged[table] = (there if isinstance(there, dict) else {}) | {key: _parsed(f"{table}.{key}", kind, text)}
        elif setting is None:
            raise _unknown(name, [*settings, *keys])
        elif setting == "pool" and text.lower() in ("0", "false", "no"):
            merged[setting] = False
        elif setting in TABLES:
            none = "; or no, for none" if setting == "pool" else ""
            raise invalid(name, f"is a table: set {', '.join(k for k in keys if k.startswith(name))}{none}")
        else:
            merged[setting] = text


def _parsed(key: str, kind: type, text: str) -> Any:
    try:
        return _FLAG_TEXTS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError) as error:
        raise invalid(key, f"{text!r} is not usable: {error}") from error


def _unknown(name: str, known: Iterable[str]) -> InvalidRequest:
    """Returns the error for a name that is no setting; it names the nearest setting, or all if none is near."""
    return invalid(name, f"is no setting; {_hint(name, known)}")


def _hint(name: str, known: Iterable[str]) -> str:
    # Without the prefix of all variables, which would make every name near.
    own = {one.removeprefix(_PREFIX): one for one in known}
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), own, 1)
    return f"did you mean {own[near[0]]}?" if near else f"there are {', '.join(sorted(known))}"


_PATHS = ("session_socket", "ready_file", "shared_dir")
_TEXTS = ("listen", "admin_listen", "advertise", "engine_id", "weights_revision", "metrics", *_PATHS)
_CHOICES = ("log_level", "log_format")
_LISTS = ("data_paths", "dial_allow", "private_networks")
_NUMBERS = {"copy_threads": int, "bandwidth_limit_bytes_per_s": float, "drain_s": float, "trace_ring_spans": int}
_FLAGS = ("read_blocks", "insecure", "exit_with_engine", "source_writes", "checksums")
_FLAG_TEXTS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def _convert(key: str, value: Any) -> Any:
    try:
        if key in _TEXTS:
            return _checked_text(key, value)
        if key in _CHOICES:
            return _checked_text(key, value).lower()
        if key in _LISTS:
            return _list(value)
        if key in _NUMBERS:
            return _number(_NUMBERS[key], value)
        if key in _FLAGS:
            return value if isinstance(value, bool) else _FLAG_TEXTS[value.lower()]
        return _table(key, value)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise invalid(key, f"{_shown(value)} is not usable: {error}") from error


def _checked_text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("it is text")
    if "\0" in value:
        raise ValueError("it has a character that ends texts")
    if key not in _PATHS:
        value.encode()  # peers are told these; a path may be any bytes
    return value


def _list(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value)
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("it is a list of texts")
    return tuple(part.strip() for part in parts if part.strip())


def _table(key: str, value: Any) -> Any:
    kind = TABLES[key]
    if isinstance(value, kind) or (key == "pool" and value in (None, False)):
        return value or None
    if not isinstance(value, Mapping):
        raise TypeError("it is a table")
    keys = {item.name: type(item.default) for item in fields(kind)}
    for name, one in value.items():
        if name not in keys:
            raise invalid(f"{key}.{name}", f"is no setting; {_hint(name, keys)}")
        try:
            if keys[name] is str:
                _checked_text(name, one)
            elif isinstance(one, int):
                _number(int, int(one))
        except (TypeError, ValueError) as error:
            raise invalid(f"{key}.{name}", f"{_shown(one)} is not usable: {error}") from error
    return kind(**value)


def _number(kind: type[int] | type[float], value: Any) -> int | float:
    """Returns a number from TOML, a variable or a flag."""
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError("it is a whole number" if kind is int else "it is a number")
    number = kind(value)
    if isinstance(number, int) and number.bit_length() > _INTEGER_BITS_MAX:
        raise ValueError(f"a whole number has {_INTEGER_BITS_MAX} bits at most")
    return number


def _shown(value: Any) -> str:
    """Returns a value as a refusal repeats it: neither long nor deep, nor with more digits than can be written."""
    if isinstance(value, str | float | bool):
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= _INTEGER_BITS_MAX else "so large a number"
    return f"a {'table' if isinstance(value, Mapping) else type(value).__name__}"


def reloaded(held: Config, read: Config) -> Config:
    """Returns what holds after a reload: the reloaded values of `read`, and all others of `held`."""
    limits = replace(held.limits, **{name: getattr(read.limits, name) for name in RELOADED_LIMITS})
    return replace(held, limits=limits, **{name: getattr(read, name) for name in RELOADED})


def changed(held: Config, read: Config) -> Iterator[str]:
    """Yields the names of settings that differ, keys of tables as `limits.wait_s`."""
    for item in fields(Config):
        mine, other = getattr(held, item.name), getattr(read, item.name)
        if is_dataclass(mine) and type(mine) is type(other):
            for key in fields(mine):
                if getattr(mine, key.name) != getattr(other, key.name):
                    yield f"{item.name}.{key.name}"
        elif mine != other:
            yield item.name
