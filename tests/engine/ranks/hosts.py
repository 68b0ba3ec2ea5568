"""Two hosts, which are network namespaces, with a link between them that can be cut.

This host has a way to each of them, but no device with an address. UCX would find one: an agent of NIXL offers all
addresses that its host has when it begins, and takes the fastest device, so tests beside these would move bytes over a
network that is soon gone.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

NETWORK = f"10.{200 + (os.getpid() >> 16) % 50}.{os.getpid() >> 8 & 255}"
_OUTSIDE = f"{NETWORK}.254"
"""From where this host calls both. It belongs to no device."""


@dataclass(frozen=True)
class Host:
    number: int

    @property
    def name(self) -> str:
        return f"kvgrpc-{os.getpid()}-{self.number}"

    @property
    def device(self) -> str:
        """Its end of the link to the other one; the only device with an address, but for its loopback."""
        return f"kv{os.getpid()}n{self.number}"

    @property
    def way(self) -> str:
        """The device on this host that leads to it."""
        return f"kv{os.getpid()}w{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def within(self) -> tuple[str, ...]:
        """The command that starts a process there."""
        return "ip", "netns", "exec", self.name


FIRST, SECOND = BOTH = Host(1), Host(2)


def ip(*words: str) -> str:
    """Raises OSError or CalledProcessError, with what it said."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def cut() -> None:
    """The link is down: nothing is said to either end."""
    ip("-n", FIRST.name, "link", "set", FIRST.device, "down")


def mend() -> None:
    ip("-n", FIRST.name, "link", "set", FIRST.device, "up")


@contextmanager
def two_hosts() -> Iterator[str]:
    """While they are there; gives why there are none, if so."""
    with ExitStack() as stack:
        try:
            for host in BOTH:
                ip("netns", "add", host.name)
                stack.callback(ip, "netns", "delete", host.name)
        except (OSError, subprocess.CalledProcessError) as error:
            yield f"no network namespace can be made: {getattr(error, 'stderr', '') or error}".strip()
            return
        link = "type", "veth", "peer", "name"
        ip("-n", FIRST.name, "link", "add", FIRST.device, *link, SECOND.device, "netns", SECOND.name)
        ip("route", "add", "local", _OUTSIDE, "dev", "lo", "table", "local")
        stack.callback(ip, "route", "delete", "local", _OUTSIDE, "dev", "lo", "table", "local")
        for host in BOTH:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
            for device in (host.device, "lo"):
                ip("-n", host.name, "link", "set", device, "up")
            _lay_way(host)
            stack.callback(ip, "link", "delete", host.way)  # a namespace goes some time after its name
        yield ""


def _lay_way(host: Host) -> None:
    """By routes alone."""
    ip("link", "add", host.way, "type", "veth", "peer", "name", host.way, "netns", host.name)
    for within in ((), ("-n", host.name)):
        ip(*within, "link", "set", host.way, "addrgenmode", "none", "up")
    ip("route", "add", f"{host.address}/32", "dev", host.way, "src", _OUTSIDE)
    ip("-n", host.name, "route", "add", f"{_OUTSIDE}/32", "dev", host.way, "src", host.address)
