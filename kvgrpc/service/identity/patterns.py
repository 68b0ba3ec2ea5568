"""Patterns of names: a whole name, `prefix*`, `*suffix`, or `*` for every name that is not empty."""

from typing import Any

ANY = "*"


def check_pattern(pattern: Any) -> str:
    """Returns the pattern. Raises ValueError for one with a star elsewhere than at one of its ends."""
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"a pattern is a text that is not empty, not {pattern!r}")
    if ANY in pattern.removesuffix(ANY).removeprefix(ANY) or (len(pattern) > 1 and pattern[0] == ANY == pattern[-1]):
        raise ValueError(f"{pattern!r} has a star elsewhere than at one end: write name, prefix*, *suffix or *")
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Returns whether a name matches a checked pattern."""
    if pattern == ANY:
        return bool(name)
    if pattern[0] == ANY:
        return name.endswith(pattern[1:])
    if pattern[-1] == ANY:
        return name.startswith(pattern[:-1])
    return name == pattern
