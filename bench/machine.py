"""Describes the machine of a run, without which a figure means nothing."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from kvgrpc import __version__

_PACKAGES = ("grpcio", "protobuf", "numpy", "nixl-cu12", "nixl-cu13", "torch")


def machine() -> dict[str, Any]:
    """Returns the processor, the memory, the kernel, and the load average of the machine."""
    load = os.getloadavg()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "load_1min": round(load[0], 2),
    }


def versions(*more: str) -> dict[str, str]:
    """Returns the versions of Python, of kvgrpc, of packages that affect the speed of kvgrpc, and of `more`
    packages.
    """
    found = {"python": platform.python_version(), "kvgrpc": __version__}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
