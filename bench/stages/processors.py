"""Measures the processor time of two servers and of the client that calls them: how much, and in which functions."""

import time
from collections.abc import Awaitable, Callable

from bench.stages.hosts import Host


async def spent_ms(
    source: Host, destination: Host, count: int, work: Callable[[], Awaitable[object]]
) -> dict[str, float]:
    """Returns the milliseconds of processor time that one of the `count` calls of `work` costs source, destination and
    this process, and the kernel's part of the servers' time.
    """
    before = _seconds(source, destination)
    await work()
    after = _seconds(source, destination)
    return {name: (after[name] - before[name]) / count * 1e3 for name in before}


async def profiled(
    source: Host, destination: Host, count: int, what: str, work: Callable[[], Awaitable[object]]
) -> list[str]:
    """Returns a profile of both servers during `work`, a line for each function."""
    hosts = {"source": source, "destination": destination}
    for host in hosts.values():
        host.ask("profile")
    await work()
    lines: list[str] = []
    for name, host in hosts.items():
        lines += host.ask("profiled", what=f"{what}, server at the {name}", count=count)["lines"]
    return lines


def _seconds(source: Host, destination: Host) -> dict[str, float]:
    at_source, at_destination = source.ask("processor_s"), destination.ask("processor_s")
    return {
        "processor_ms_source": at_source["seconds"],
        "processor_ms_destination": at_destination["seconds"],
        "processor_ms_client": time.process_time(),
        "kernel_ms_source": at_source["kernel_s"],
        "kernel_ms_destination": at_destination["kernel_s"],
    }
