"""What a figure is to reach."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """At least, or at most, a bound."""

    name: str
    value: float | None
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound
