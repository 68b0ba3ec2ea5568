"""Replaces the audit of a liar's lead, which hears the answers to its lies."""

from typing import Any

from sim.checks.audit import Audit


class Unaudited(Audit):
    """An audit that accepts everything."""

    def __init__(self) -> None:
        """Keeps nothing: there is nothing to check."""

    def __getattribute__(self, name: str) -> Any:
        return _nothing


def _nothing(*_: Any, **__: Any) -> bool:
    return False
