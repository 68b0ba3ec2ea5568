"""`kvgrpc bench pull --device`: it measures both directions with a device that is none, and skips without a GPU."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from kvgrpc.bench.measures import devices
from kvgrpc.bench.plan import PULL_QUICK
from kvgrpc.bench.run import run_devices
from kvgrpc.cli.app import app
from kvgrpc.core.values.descriptors import Ids
from kvgrpc.engine import Device


class Array:
    """Memory of this process, copied at once."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.nbytes = memory.nbytes
        self._memory = memory
        self._mirror = memory[:0]

    def open(self, mirror: NDArray[np.uint8]) -> None:
        self._mirror = mirror

    def to_host(self, offsets: Ids, nbytes: Ids) -> "Array":
        return self._copy(self._mirror, self._memory, offsets, nbytes)

    def to_device(self, offsets: Ids, nbytes: Ids) -> "Array":
        return self._copy(self._memory, self._mirror, offsets, nbytes)

    def close(self) -> None:
        self._mirror = self._memory[:0]

    def synchronize(self) -> None:
        """It is there."""

    def _copy(self, into: NDArray[np.uint8], of: NDArray[np.uint8], offsets: Ids, nbytes: Ids) -> "Array":
        for at, count in zip(offsets.tolist(), nbytes.tolist(), strict=True):
            into[at : at + count] = of[at : at + count]
        return self


def arrays(nbytes: int) -> tuple[Device, Device]:
    memory = np.zeros(nbytes, dtype=np.uint8)
    return Array(memory), Array(memory)


@pytest.mark.timeout(180)
def test_both_directions_are_measured_beside_the_copies_alone() -> None:
    plan = replace(PULL_QUICK, data_paths=("shm",), layouts=("scattered",))
    said: list[str] = []
    found = asyncio.run(run_devices(plan, "arrays", said.append, arrays))
    rows = [(case.direction, case.datapath, case.blocks, case.block_bytes) for case in found.cases]
    assert rows == [(direction, "shm", 256, 16 << 10) for direction in ("out", "in")]
    assert all(case.gbps > 0 and case.copy_gbps > 0 and case.ratio_copies > 0 for case in found.cases)
    shown = found.to_json()
    assert (shown["device"], shown["quick"], len(shown["cases"])) == ("arrays", True, 2)


def test_without_a_gpu_it_says_so_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "missing", lambda _: "there is none")
    result = CliRunner().invoke(app, ["bench", "pull", "--device", "cuda", "--quick"])
    assert (result.exit_code, result.output) == (0, "SKIP: there is none\n")


def test_another_device_is_an_option_that_is_not_usable() -> None:
    result = CliRunner().invoke(app, ["bench", "pull", "--device", "tpu"])
    assert result.exit_code == 2
    assert "choose from host, cuda" in result.output
