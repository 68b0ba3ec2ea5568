"""A configuration as TOML, as it takes effect: what `kvgrpc serve --check` prints, and what `--config` takes."""

import json
from dataclasses import fields, is_dataclass
from typing import Any

from kvgrpc.config import Config


def shown(config: Config) -> str:
    """Returns all settings, each with its value: single ones first, then the tables."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    lines = [f"{name} = {_value(value)}" for name, value in values.items() if not is_dataclass(value) and value != ()]
    lines = [line for line in lines if not line.endswith("= null")]
    for name, table in values.items():
        if is_dataclass(table):
            lines += ["", f"[{name}]"]
            lines += [f"{item.name} = {_value(getattr(table, item.name))}" for item in fields(table)]
    return "\n".join(lines)


def _value(value: Any) -> str:
    """Returns a value of TOML. Its texts, numbers, lists and booleans are those of JSON; None is none."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
