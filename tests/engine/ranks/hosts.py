"""A second host: a network namespace, with a link to this one that can be cut."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAME = f"kvgrpc-{os.getpid()}"
HERE, THERE = f"kv{os.getpid()}a"[:15], f"kv{os.getpid()}b"[:15]
"""The two ends of the link."""
NETWORK = f"10.{200 + (os.getpid() >> 16) % 50}.{os.getpid() >> 8 & 255}"
ADDRESS = f"{NETWORK}.1"
"""Of this host."""
WITHIN = ("ip", "netns", "exec", NAME)
"""The command that starts a process there."""


def ip(*words: str) -> None:
    """Raises OSError or CalledProcessError, with what it said."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def cut() -> None:
    """The link is down: nothing is said to either end."""
    ip("link", "set", HERE, "down")


def mend() -> None:
    ip("link", "set", HERE, "up")


@contextmanager
def second_host() -> Iterator[str]:
    """While it is there; gives why there is none, if so."""
    try:
        ip("netns", "add", NAME)
    except (OSError, subprocess.CalledProcessError) as error:
        yield f"no network namespace can be made: {getattr(error, 'stderr', '') or error}".strip()
        return
    try:
        ip("link", "add", HERE, "type", "veth", "peer", "name", THERE, "netns", NAME)
        ip("address", "add", f"{ADDRESS}/24", "dev", HERE)
        ip("link", "set", HERE, "up")
        ip("-n", NAME, "address", "add", f"{NETWORK}.2/24", "dev", THERE)
        for device in (THERE, "lo"):
            ip("-n", NAME, "link", "set", device, "up")
        yield ""
    finally:
        ip("netns", "delete", NAME)
