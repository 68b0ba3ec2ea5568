"""Hosts on a switch, which delays, loses or cuts what goes between them."""

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.hosts import switch
from tests.hosts.hosts import Host, bring_up, ip, namespaces

SEED = 7
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000

Cut = tuple[Host, Host]
CONDITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "20 ms": {"delay_s": 0.02},
    "2 % lost": {"loss": 0.02},
    "20 ms, 1 % lost": {"delay_s": 0.02, "loss": 0.01},
}
"""Networks on which everything has to succeed."""


class Network:
    """Hosts, and the process of the switch between them."""

    def __init__(self, hosts: Sequence[Host], process: "subprocess.Popen[str]") -> None:
        self.hosts = tuple(hosts)
        self._process = process

    def set(
        self, *, delay_s: float = 0.0, loss: float = 0.0, cut: Sequence[Cut] = (), one_way: Sequence[Cut] = ()
    ) -> None:
        """Replaces the state of the network, and returns when it holds. `loss` is a share of all packets. Of hosts in
        `one_way` the second does not hear the first.
        """
        both, single = ([(one.number, other.number) for one, other in pairs] for pairs in (cut, one_way))
        state = {"delay_s": delay_s, "loss": loss, "cut": both, "one_way": single, "seed": SEED}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(state) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def links_of(self, host: Host) -> list[Cut]:
        return [(host, other) for other in self.hosts if other is not host]


@contextmanager
def switched(count: int) -> Iterator[Network | str]:
    """Makes hosts for the duration of the context. Yields the reason if that is impossible."""
    hosts = [Host(number + 1) for number in range(count)]
    with ExitStack() as stack:
        if why_not := stack.enter_context(namespaces(hosts)):
            yield why_not
            return
        try:
            devices = {host.number: _tun(host, stack) for host in hosts}
        except OSError as error:
            yield f"no tun device can be made: {error}"
            return
        for host in hosts:
            ip("link", "set", host.device, "netns", host.name)
            bring_up(host, stack)
        with subprocess.Popen(
            [sys.executable, switch.__file__, *(f"{number}={device}" for number, device in devices.items())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=tuple(devices.values()),
        ) as process:  # fmt: skip
            yield Network(hosts, process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(10) == 0


def _tun(host: Host, stack: ExitStack) -> int:
    """Makes the device of a host, which is here at first. Returns the descriptor of its other end."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", host.device.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor
