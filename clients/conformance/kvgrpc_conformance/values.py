"""Evaluates values in cases: `$variables`, generated values (`{"$range": [0, 40]}`), and paths into answers.

Requests are filled in just before they are sent, so a value that an earlier step saved is used.
"""

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any

Json = Any
"""A value that `json.loads` returns."""

_NAME = r"[A-Za-z_]\w*(?:\.\w+)*"
_WHOLE = re.compile(rf"\$({_NAME})")
_INSIDE = re.compile(rf"\$\{{({_NAME})\}}")


class CaseError(Exception):
    """Raised when the case itself is wrong, so that nothing can judge it."""


def at(value: Json, path: str) -> Json:
    """Returns the value at `reply.blocks.groups[0].group`; None where there is none, as for a field with its default
    value.
    """
    for name in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, list):
            value = value[int(name)] if name.lstrip("-").isdecimal() and -len(value) <= int(name) < len(value) else None
        elif isinstance(value, Mapping):
            value = value.get(name)
        else:
            return None
    return value


def names_in(value: Json) -> set[str]:
    """Returns the variables that a value needs."""
    if isinstance(value, str):
        whole = _WHOLE.fullmatch(value)
        found = [whole[1]] if whole else _INSIDE.findall(value)
        return {name.partition(".")[0] for name in found}
    if isinstance(value, Mapping):
        return set().union(*(names_in(item) for item in value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*(names_in(item) for item in value)) if value else set()
    return set()


def fill(value: Json, variables: Mapping[str, Json]) -> Json:
    """Returns the value with its variables filled in and its generated values made. Raises CaseError."""
    if isinstance(value, str):
        return _fill_text(value, variables)
    if isinstance(value, list):
        return [fill(item, variables) for item in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((name, given),) = value.items()
        if name in _MAKERS:
            try:
                return _MAKERS[name](fill(given, variables))
            except (TypeError, ValueError, IndexError, AttributeError) as error:
                raise CaseError(f"{name} of {given!r}: {error}") from error
    return {name: fill(item, variables) for name, item in value.items()}


def _fill_text(text: str, variables: Mapping[str, Json]) -> Json:
    whole = _WHOLE.fullmatch(text)
    if whole:
        return _variable(whole[1], variables)
    return _INSIDE.sub(lambda found: str(_variable(found[1], variables)), text)


def _variable(path: str, variables: Mapping[str, Json]) -> Json:
    name, _, rest = path.partition(".")
    if name not in variables:
        raise CaseError(f"${name} stands for nothing: no step before has saved it")
    return at(variables[name], rest) if rest else variables[name]


def _add(pair: Json) -> Json:
    """Returns the sum of two numbers. 64-bit numbers are texts in JSON, and stay texts."""
    left, right = pair
    total = int(left or 0) + int(right)
    return str(total) if isinstance(left, str) else total


def _changed(token: str) -> str:
    """Returns the bytes with one bit of the last byte flipped."""
    data = bytearray(base64.b64decode(token))
    data[-1] ^= 1
    return base64.b64encode(data).decode()


def _merged(parts: Json) -> Json:
    """Returns the objects merged in order; null removes a field."""
    whole = {name: item for part in parts for name, item in part.items()}
    return {name: item for name, item in whole.items() if item is not None}


_MAKERS: dict[str, Callable[[Json], Json]] = {
    "$range": lambda pair: list(range(pair[0], pair[0] + pair[1])),
    "$repeat": lambda pair: [pair[0]] * pair[1],
    "$text": lambda length: "x" * length,
    "$bytes": lambda length: base64.b64encode(bytes(length)).decode(),
    "$add": _add,
    "$changed": _changed,
    "$merge": _merged,
    "$concat": lambda lists: [item for one in lists for item in one],
}
