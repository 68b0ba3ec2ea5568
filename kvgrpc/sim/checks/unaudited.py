"""In place of the checks of one lead: for a liar, whose lead hears what it has brought upon itself."""

from typing import Any

from kvgrpc.sim.checks.audit import Audit


class Unaudited(Audit):
    """Whatever it hears and says is right."""

    def __init__(self) -> None:
        """There is nothing to look at."""

    def __getattribute__(self, name: str) -> Any:
        return _nothing


def _nothing(*_: Any, **__: Any) -> bool:
    return False
