"""Targets of figures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A figure and its bound, a maximum or with `at_least` a minimum."""

    name: str
    value: float | None
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound
