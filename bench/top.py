"""Measures what `kvgrpc top` takes of a processor in each of its views.

    python -m bench.top --json

Two leads have leases and move blocks. The command runs as a process on a pseudo terminal, and is told by its keys which
view to show. Its processor time is the kernel's.
"""

import argparse
import asyncio
import fcntl
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from bench.fleet.child import processor_s
from bench.machine import machine, versions
from bench.overload.site import Site, site
from bench.stages.calls import Caller
from kvgrpc.cli.top.rows import VIEWS

BLOCKS = 64
ROWS, COLUMNS = 50, 200
SETTLE_S = 3.0
"""Time after a key before a view is measured, in seconds."""
READ_BYTES = 1 << 16
DRAWN_S = 60.0
"""Timeout for the first drawing, in seconds."""


class Screen:
    """A running `kvgrpc top`, and its terminal."""

    def __init__(self, terminal: int, pid: int) -> None:
        self._terminal, self.pid = terminal, pid
        self.drawn_bytes = 0
        self.drawn = asyncio.Event()
        """Set once there is something on the terminal."""

    def read(self) -> None:
        """Takes what it has drawn. The event loop calls it."""
        try:
            self.drawn_bytes += len(os.read(self._terminal, READ_BYTES))
        except OSError:  # its process has ended
            asyncio.get_running_loop().remove_reader(self._terminal)
        else:
            self.drawn.set()

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())


@contextmanager
def screen(*arguments: str) -> Iterator[Screen]:
    """Runs `kvgrpc top`. Its terminal is read by the running event loop."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "kvgrpc", "top", *arguments]
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    os.close(its)
    made, loop = Screen(mine, process.pid), asyncio.get_running_loop()
    loop.add_reader(mine, made.read)
    try:
        yield made
        if process.poll() is not None:
            raise RuntimeError(f"kvgrpc top ended with {process.returncode}")
    finally:
        loop.remove_reader(mine)
        process.kill()
        process.wait()
        os.close(mine)


class Pulls:
    """Pulls that begin at a rate, whatever becomes of those before, while a block is free."""

    def __init__(self, caller: Caller, rate: float) -> None:
        self._caller, self._rate = caller, rate
        self.ended = 0

    async def run(self) -> None:
        """Never ends."""
        free = asyncio.Queue[int]()
        for number in range(BLOCKS):
            free.put_nowait(number)
        began, begun = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                begun += 1
                group.create_task(self._pull(await free.get(), free))
                await asyncio.sleep(max(0.0, began + begun / self._rate - time.monotonic()))

    async def _pull(self, number: int, free: "asyncio.Queue[int]") -> None:
        block = np.array([number], dtype=np.int64)
        await self._caller.pull(block, block)
        self.ended += 1
        free.put_nowait(number)


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of each view."""
    with site(tls=False) as place:
        async with Caller(place.source.address, place.destination.address) as caller:
            await caller.allocate(BLOCKS)
            await caller.leave_leases(options.leases)
            pulls = Pulls(caller, options.rate)
            running = asyncio.create_task(pulls.run())
            try:
                return await _views(options, place, pulls)
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running


async def _views(options: argparse.Namespace, place: Site, pulls: Pulls) -> dict[str, Any]:
    arguments = (place.source.address, place.destination.address, "--interval-s", str(options.interval_s))
    shares: dict[str, list[float]] = {name: [] for name in VIEWS}
    rates, drawn = [], {}
    with screen(*arguments) as shown:
        await asyncio.wait_for(shown.drawn.wait(), DRAWN_S)
        for _ in range(options.repeats):
            for number, name in enumerate(VIEWS, 1):
                shown.press(f"{number}")
                await asyncio.sleep(SETTLE_S)
                before, began = (processor_s(shown.pid), pulls.ended, shown.drawn_bytes), time.monotonic()
                await asyncio.sleep(options.seconds)
                took_s = time.monotonic() - began
                shares[name].append((processor_s(shown.pid) - before[0]) / took_s)
                rates.append((pulls.ended - before[1]) / took_s)
                drawn[name] = round((shown.drawn_bytes - before[2]) / took_s)
    return {
        "transfers_per_s": round(statistics.median(rates), 1),
        "drawn_bytes_per_s": drawn,
        "core_share": {name: round(statistics.median(found), 3) for name, found in shares.items()},
        "core_share_max": {name: round(max(found), 3) for name, found in shares.items()},
    }


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.top", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--leases", type=int, default=1000, help="leases at the source (1000)")
    parser.add_argument("--rate", type=float, default=200.0, help="transfers that begin in a second (200)")
    parser.add_argument("--interval-s", type=float, default=2.0, help="time between two looks, s (2)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each view is measured, s (10)")
    parser.add_argument("--repeats", type=int, default=2, help="number of times for each view (2)")
    options = parser.parse_args()
    found = {"machine": machine(), "versions": versions(), "options": vars(options)}
    print(json.dumps(found | asyncio.run(measured(options)), indent=None if options.json else 2), flush=True)


if __name__ == "__main__":
    main()
