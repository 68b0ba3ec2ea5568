"""Compares an answer with what a case expects, field by field. Fields that the case does not name are ignored.

JSON omits fields with their default value, so 0, "", false, [] and {} also match a missing field. 64-bit numbers are
texts in JSON, and languages write durations with different numbers of decimals, so numbers are compared as numbers.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from .values import Json

_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)s?")


def mismatches(expected: Json, found: Json, where: str = "") -> list[str]:
    """Returns what differs from the expected value, one sentence each; an empty list when nothing does."""
    if isinstance(expected, Mapping):
        if any(name.startswith("$") for name in expected):
            return [line for name, wanted in expected.items() for line in _test(name, wanted, found, where)]
        if found is not None and not isinstance(found, Mapping):
            return [f"{_at(where)} is {found!r}, not an object"]
        held = found or {}
        return [
            line for name, wanted in expected.items() for line in mismatches(wanted, held.get(name), f"{where}.{name}")
        ]
    if isinstance(expected, list):
        rows = found or []
        if not isinstance(rows, list) or len(rows) != len(expected):
            return [f"{_at(where)} has not {len(expected)} rows: {found!r}"]
        pairs = enumerate(zip(expected, rows, strict=True))
        return [line for i, (wanted, row) in pairs for line in mismatches(wanted, row, f"{where}[{i}]")]
    return [] if _same(expected, found) else [f"{_at(where)} is {found!r}, not {expected!r}"]


def _same(expected: Json, found: Json) -> bool:
    if found is None:
        return expected in (None, 0, "", False) or _number(expected) == 0
    if expected == found and type(expected) is type(found):
        return True
    if isinstance(expected, bool) or isinstance(found, bool):
        return False
    left, right = _number(expected), _number(found)
    return left is not None and left == right


def _number(value: Json) -> Fraction | None:
    """Returns the number that a value stands for: a number, a 64-bit number as text, or a duration in seconds."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return Fraction(value)
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    return Fraction(match[1]) if match else None


def _test(name: str, wanted: Json, found: Json, where: str) -> list[str]:
    if name in _ROWS:
        return _ROWS[name](wanted, found or [], where)
    if name not in TESTS:
        return [f"{_at(where)}: no test is called {name}"]
    return [] if TESTS[name](wanted, found) else [f"{_at(where)} is {found!r}, not {name} {wanted!r}"]


def _compared(relation: Callable[[Fraction, Fraction], bool]) -> Callable[[Json, Json], bool]:
    def compare(wanted: Json, found: Json) -> bool:
        # Either value may be a 0 that JSON omitted, because the expected value may have been saved from an answer.
        left, right = (_number(0 if value is None else value) for value in (found, wanted))
        return left is not None and right is not None and relation(left, right)

    return compare


def _has(wanted: Json, rows: list[Json], where: str) -> list[str]:
    if any(not mismatches(wanted, row) for row in rows):
        return []
    return [f"{_at(where)} has no row like {wanted!r}: {rows!r}"]


def _all(wanted: Json, rows: list[Json], where: str) -> list[str]:
    return [line for i, row in enumerate(rows) for line in mismatches(wanted, row, f"{where}[{i}]")]


def _none(wanted: Json, rows: list[Json], where: str) -> list[str]:
    return [
        f"{_at(where)}[{i}] is like {wanted!r}: {row!r}" for i, row in enumerate(rows) if not mismatches(wanted, row)
    ]


def _at(where: str) -> str:
    return where.lstrip(".") or "the answer"


def _is_set(found: Json) -> bool:
    return found is not None


TESTS: dict[str, Callable[[Json, Json], bool]] = {
    "$set": lambda wanted, found: _is_set(found) == wanted,
    "$unset": lambda wanted, found: _is_set(found) != wanted,
    "$len": lambda wanted, found: len(found or []) == wanted,
    "$one_of": lambda wanted, found: any(not mismatches(one, found) for one in wanted),
    "$matches": lambda wanted, found: re.search(wanted, found or "") is not None,
    "$not": lambda wanted, found: bool(mismatches(wanted, found)),
    "$ge": _compared(lambda found, wanted: found >= wanted),
    "$gt": _compared(lambda found, wanted: found > wanted),
    "$le": _compared(lambda found, wanted: found <= wanted),
    "$lt": _compared(lambda found, wanted: found < wanted),
}
"""Tests of one value."""

_ROWS: dict[str, Callable[[Json, list[Json], str], list[str]]] = {"$has": _has, "$all": _all, "$none": _none}
"""Tests of the rows of a list."""

TEST_NAMES = frozenset({*TESTS, *_ROWS})
