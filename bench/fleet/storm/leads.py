"""The leads of a storm: real processes that publish themselves in etcd, and are killed and added at random."""

import asyncio
import itertools
import random
from pathlib import Path

from bench.fleet.engines import MODEL
from bench.fleet.storm.pool_memory import ready_file
from bench.fleet.storm.prompts import POOL
from tests.registry.etcds import free_port
from tests.service.engines import ServeProcess

LEADS_MIN, LEADS_MAX = 4, 8
PAUSE_S = (1.0, 3.0)
"""Shortest and longest time between two kills or additions, in seconds."""
SETTINGS = """
[fleet]
registry = "etcd://{etcd}"
model = "{model}"
entry_ttl_s = {ttl_s}
"""


class StormLeads:
    """All leads, of which some have died."""

    def __init__(self, folder: Path, etcd: str, ttl_s: int, seed: int) -> None:
        self.folder = folder / "ready"
        self.folder.mkdir()
        self._logs = folder
        self._settings = SETTINGS.format(etcd=etcd, model=MODEL, ttl_s=ttl_s)
        self._chance = random.Random(seed)  # noqa: S311 - the same in every run
        self._numbers = itertools.count()
        self._living: dict[str, tuple[str, ServeProcess]] = {}
        self._dead: list[tuple[str, str]] = []
        self._processes: list[ServeProcess] = []
        self.kills = self.added = 0

    def begin(self) -> None:
        """Starts as many leads as there may be."""
        while len(self._living) < LEADS_MAX:
            self._start(f"storm-{next(self._numbers)}", f"127.0.0.1:{free_port()}")
        self.wait_ready()

    def wait_ready(self) -> None:
        """Waits until all living leads serve."""
        for _, process in self._living.values():
            process.wait_ready()

    @property
    def engine_ids(self) -> list[str]:
        """Names of the living engines."""
        return list(self._living)

    @property
    def addresses(self) -> list[str]:
        """Addresses of the living leads."""
        return [address for address, _ in self._living.values()]

    async def storm(self, seconds: float) -> None:
        """Kills and adds leads for a time."""
        async with asyncio.timeout(seconds):
            while True:
                await asyncio.sleep(self._chance.uniform(*PAUSE_S))
                many = len(self._living)
                kills = many == LEADS_MAX or (many > LEADS_MIN and self._chance.random() < 0.5)
                await asyncio.to_thread(self._kill if kills else self._add)

    def end(self) -> None:
        """Ends all leads. Fails if one of them has logged a defect."""
        for process in self._processes:
            process.end()

    def _kill(self) -> None:
        engine_id = self._chance.choice(sorted(self._living))
        address, process = self._living.pop(engine_id)
        process.kill()
        self._dead.append((engine_id, address))
        self.kills += 1

    def _add(self) -> None:
        """Starts a new engine, or the next life of a dead one at its address."""
        if self._dead and self._chance.random() < 0.5:
            engine_id, address = self._dead.pop(self._chance.randrange(len(self._dead)))
        else:
            engine_id, address = f"storm-{next(self._numbers)}", f"127.0.0.1:{free_port()}"
        self._start(engine_id, address)
        self.added += 1

    def _start(self, engine_id: str, address: str) -> None:
        ready = ready_file(self.folder, address)
        ready.unlink(missing_ok=True)  # of a life that was killed
        process = ServeProcess(
            self._logs / f"life-{len(self._processes)}", "--engine-id", engine_id, "--listen", address,
            "--ready-file", str(ready), "--data-paths", "shm", "--read-blocks", "--drain-s", "0", *POOL,
            settings=self._settings,
        )  # fmt: skip
        process.ready_file = ready
        self._living[engine_id] = address, process
        self._processes.append(process)
