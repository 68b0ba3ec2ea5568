"""Simulated engines: their names and addresses, and their present lives, which several processes share in a file."""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgrpc.fleet.entry import EngineEntry, EngineRole

MODEL = "m"
"""Name of the model of all engines."""
HOST_ENGINES = 8
"""Number of engines on each host."""
LIFE_BYTES = 8


@dataclass(frozen=True)
class SimulatedEngine:
    """One engine of the fleet. Every second one computes prompts."""

    number: int
    address: str

    @property
    def engine_id(self) -> str:
        """Name of the engine."""
        return name_of(self.number)

    def entry(self, life: int, *, draining: bool = False) -> EngineEntry:
        """Returns what the lead of the engine publishes in one of its lives."""
        return EngineEntry(
            self.engine_id, (self.address,), life, life, (EngineRole.PREFILL, EngineRole.DECODE)[self.number % 2],
            "a" * 64, "b" * 64, ("shm", "cma"), f"host-{self.number // HOST_ENGINES}", draining=draining,
            version="0.1.0", model_name=MODEL,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Returns the engine as another process reads it."""
        return {"number": self.number, "address": self.address}


def name_of(number: int) -> str:
    """Returns the name of an engine."""
    return f"engine-{number:05}"


class PresentLives:
    """The number of each engine's present life, in a file that publishers write and answerers read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._lives = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")

    @classmethod
    def new(cls, path: Path, count: int) -> "PresentLives":
        """Makes the file. No engine has lived yet."""
        path.write_bytes(bytes(count * LIFE_BYTES))
        return cls(path)

    def __getitem__(self, number: int) -> int:
        return self._lives[number]

    def begin(self, number: int) -> int:
        """Begins another life of an engine, and returns its number."""
        self._lives[number] += 1
        return self._lives[number]
