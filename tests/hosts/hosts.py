"""Hosts, which are network namespaces: two of them with a link that can be cut, or more on a switch (switched.py).

This host has a route to each of them, but no device with an address. A NIXL agent offers all addresses that its host
has at start, and UCX picks the fastest device. With an address here, parallel tests would move bytes over a network
that soon disappears. A process beside the run removes what a killed run leaves (left_hosts.py).
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.hosts import left_hosts

NETWORK = f"10.{200 + (os.getpid() >> 8) % 50}.{os.getpid() & 255}"
"""First three numbers of all addresses. Tests that run beside each other have process ids that lie close together."""
_OUTSIDE = f"{NETWORK}.254"
"""This host's source address for calls to both hosts. It belongs to no device."""


@dataclass(frozen=True)
class Host:
    number: int

    @property
    def name(self) -> str:
        return f"kvgrpc-{os.getpid()}-{self.number}"

    @property
    def device(self) -> str:
        """The host's end of its link. It is the only device with an address, except the loopback."""
        return f"kv{os.getpid()}n{self.number}"

    @property
    def way(self) -> str:
        """The device on this host that leads to the host."""
        return f"kv{os.getpid()}w{self.number}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def within(self) -> tuple[str, ...]:
        """The command that starts a process on this host."""
        return "ip", "netns", "exec", self.name


FIRST, SECOND = BOTH = Host(1), Host(2)


def ip(*words: str) -> str:
    """Runs `ip` and returns its output. Raises OSError or CalledProcessError, with its error output."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def cut() -> None:
    """Takes the link down. Neither end is notified."""
    ip("-n", FIRST.name, "link", "set", FIRST.device, "down")


def mend() -> None:
    ip("-n", FIRST.name, "link", "set", FIRST.device, "up")


@contextmanager
def two_hosts() -> Iterator[str]:
    """Makes two hosts for the duration of the context. Yields the reason if that is impossible, else ""."""
    with ExitStack() as stack:
        why_not = stack.enter_context(namespaces(BOTH))
        if not why_not:
            link = "type", "veth", "peer", "name"
            ip("-n", FIRST.name, "link", "add", FIRST.device, *link, SECOND.device, "netns", SECOND.name)
            for host in BOTH:
                bring_up(host, stack)
        yield why_not


@contextmanager
def namespaces(hosts: Sequence[Host]) -> Iterator[str]:
    """Makes hosts without links for the duration of the context. Yields the reason if that is impossible, else ""."""
    with ExitStack() as stack:
        stack.enter_context(_guard(hosts))
        try:
            for host in hosts:
                ip("netns", "add", host.name)
                stack.callback(left_hosts.remove_namespace, host.name)
        except (OSError, subprocess.CalledProcessError) as error:
            yield f"no network namespace can be made: {getattr(error, 'stderr', '') or error}".strip()
            return
        ip("route", "add", "local", _OUTSIDE, "dev", "lo", "table", "local")
        stack.callback(ip, "route", "delete", "local", _OUTSIDE, "dev", "lo", "table", "local")
        yield ""


@contextmanager
def _guard(hosts: Sequence[Host]) -> Iterator[None]:
    """Has the hosts removed should this process end within the context."""
    names = [name for host in hosts for name in (host.name, host.way)]
    command = [sys.executable, left_hosts.__file__, str(os.getpid()), _OUTSIDE, *names]
    with subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def bring_up(host: Host, stack: ExitStack) -> None:
    """Gives the device of a host its address, and lays the way from this host, which ends with the stack."""
    ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
    for device in (host.device, "lo"):
        ip("-n", host.name, "link", "set", device, "up")
    _lay_way(host)
    stack.callback(ip, "link", "delete", host.way)  # a namespace outlives its name for a while


def _lay_way(host: Host) -> None:
    """Connects this host and another one by routes, without an address."""
    ip("link", "add", host.way, "type", "veth", "peer", "name", host.way, "netns", host.name)
    for within in ((), ("-n", host.name)):
        ip(*within, "link", "set", host.way, "addrgenmode", "none", "up")
    ip("route", "add", f"{host.address}/32", "dev", host.way, "src", _OUTSIDE)
    ip("-n", host.name, "route", "add", f"{_OUTSIDE}/32", "dev", host.way, "src", host.address)
