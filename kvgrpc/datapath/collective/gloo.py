"""Gloo: a process group over TCP, for host memory. The module imports torch, so only the thread of a group imports it.

Messages use several connections in turn, each with a thread of Gloo's at either side: while one thread ends a message
and looks for the next, another one moves bytes.

Gloo accepts the first peer that connects to its port, and knows no secret. So each side gives the other a token by way
of their leads, and the connected peer must show it before anything is sent or received. Only ports and addresses of the
other side's values reach Gloo, in a form that Gloo itself made.

Each connection has a Gloo device, which listens and has a thread. The device is a lazy one, which connects late: only
such a group stops its device before it forgets its connections. Otherwise a peer that comes after a group has given up
would be connected to memory that belongs to somebody else by then. For the same reason a device is never reused.

Gloo offers no way to end a send or receive in flight except to wait, and a wait that times out closes the connection.
`connection.shut_down` closes it sooner. Gloo also never ends a group that has bytes to move for a forgotten send or
receive. So each is waited for, whatever went wrong before.
"""

import ctypes
import hmac
import secrets
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.collective.connection import (
    admit_nobody_else,
    bound_what_is_unsent,
    connections,
    shut_down,
    sockets,
)
from kvgrpc.datapath.collective.group import PROOF_S, RECEIVER, SENDER
from kvgrpc.datapath.collective.half import CONNECTIONS, TOKEN_BYTES, Address, Half, read_half
from kvgrpc.datapath.collective.messages import PACKED_BYTES_MAX, Message, copy_rows
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.collective.rendezvous_store import OwnStore

_ProcessGroup: Any = distributed.ProcessGroupGloo  # its methods have no types

_TAGS = (1 << 31) - 1
"""Exclusive bound of Gloo's tags for sends. The number itself is the tag for tokens."""
CONNECT_S = PROOF_S
"""Maximum time to make a connection, in seconds."""
END_S = 1.0
"""Time for the library to end what is in flight on closed connections, in seconds. Then the wait closes them."""
_TIMES = 5
"""Factor by which Gloo waits longer for a connection than it was told."""
_SIZE = struct.Struct("=Q")
"""Length before each part of Gloo's description of a device: the host's name, then the address."""


@dataclass(eq=False)
class GlooLaunch:
    """A message that the library has."""

    work: Any
    message: Message
    buffer: torch.Tensor


class GlooGroup:
    """One connected side of a group, which listens at address `host`. Raises DataPathFailed if the other side does not
    come, DataPathUnavailable if it listens where this side does not, and RuntimeError if the library cannot listen.
    """

    def __init__(self, *, sends: bool, host: str, rendezvous: Rendezvous) -> None:
        self._sends = sends
        self._spare: list[torch.Tensor] = []
        """Buffers of messages that travel packed."""
        self._works: deque[Any] = deque()
        """Sends and receives that nobody has waited for, in order. For each, the library ends one wait."""
        self._launched = (0, 0)
        """Number of the last send launched, and how many of its messages were."""
        before = sockets()
        own, self._peer = (SENDER, RECEIVER) if sends else (RECEIVER, SENDER)
        made = [_GlooConnection(own, self._peer, host) for _ in range(CONNECTIONS)]
        half = Half(secrets.token_bytes(TOKEN_BYTES), tuple(connection.address for connection in made))
        peers = read_half(rendezvous.exchange(half.values), host)
        try:
            self._connect(made, half, peers)
        except RuntimeError as error:
            self._sockets = connections(half.addresses, peers.addresses, before)
            self.close()
            raise DataPathFailed(str(error)) from error
        self._connected = made
        self._sockets = connections(half.addresses, peers.addresses, before)
        admit_nobody_else(half.addresses, before)
        if sends:
            bound_what_is_unsent(self._sockets)

    def launch(self, message: Message, number: int) -> GlooLaunch:
        """Hands a message of send `number` to the library, which matches no message of another send."""
        send, index = self._launched
        index = index if send == number else 0
        self._launched = number, index + 1
        group = self._connected[index % CONNECTIONS].group
        buffer = _at(message.address, message.nbytes) if message.address else self._buffer(message.nbytes)
        part, tag = buffer[: message.nbytes], number % _TAGS
        if not self._sends:
            work = group.recv([part], self._peer, tag)
        else:
            if not message.address:
                copy_rows(message.rows, destination=buffer.data_ptr())
            work = group.send([part], self._peer, tag)
        self._works.append(work)
        return GlooLaunch(work, message, buffer)

    def land(self, flying: GlooLaunch, stall_s: float) -> None:
        """Waits until a message has moved, in launch order. Raises RuntimeError if it does not move."""
        self._works.popleft()
        flying.work.wait(timedelta(seconds=stall_s))
        if not flying.message.address:
            if not self._sends:
                copy_rows(flying.message.rows, source=flying.buffer.data_ptr())
            if len(flying.buffer) == PACKED_BYTES_MAX:
                self._spare.append(flying.buffer)

    def shut_down(self) -> None:
        """Ends what is in flight by ending its connections. Any thread may call it."""
        shut_down(self._sockets)

    def close(self) -> None:
        """Ends the group, and waits for the end of all that was launched."""
        self.shut_down()
        give_up_at = time.monotonic() + END_S
        while self._works:
            with suppress(RuntimeError):
                self._works.popleft().wait(_until(give_up_at))

    def _connect(self, made: list["_GlooConnection"], own: Half, peers: Half) -> None:
        """Connects the group. Raises RuntimeError unless the other side comes, at each connection."""
        give_up_at = time.monotonic() + PROOF_S
        for connection, address in zip(made, peers.addresses, strict=True):
            if time.monotonic() > give_up_at:
                raise RuntimeError("the other rank took too long to come")
            connection.find(address)
            self._prove(connection.group, own.token, peers.token, give_up_at)

    def _prove(self, connected: Any, own: bytes, peers: bytes, give_up_at: float) -> None:
        """Raises RuntimeError unless the connected process knows the token that the peer's lead was given."""
        said, heard = torch.frombuffer(bytearray(peers), dtype=torch.uint8), torch.zeros(TOKEN_BYTES, dtype=torch.uint8)
        self._works.append(hearing := connected.recv([heard], self._peer, _TAGS))  # returns when there is a connection
        self._works.append(sending := connected.send([said], self._peer, _TAGS))
        self._works.popleft()
        hearing.wait(_until(give_up_at))
        if not hmac.compare_digest(heard.numpy().tobytes(), own):
            raise RuntimeError("who connected to this rank is not the peer's")
        self._works.popleft()
        sending.wait(_until(give_up_at))

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Returns a buffer. A run that crosses the end of an allocation may be longer than a packed message."""
        if nbytes <= PACKED_BYTES_MAX and self._spare:
            return self._spare.pop()
        return torch.empty(max(nbytes, PACKED_BYTES_MAX), dtype=torch.uint8)


class _GlooConnection:
    """A group of the library's for one connection, which the first message makes. Raises RuntimeError if the library
    states its address in an unknown form.
    """

    def __init__(self, own: int, peer: int, host: str) -> None:
        options = _ProcessGroup._Options()  # noqa: SLF001 - the only way to say where it listens
        options._devices = [_ProcessGroup.create_device(hostname=host, lazy_init=True)]  # noqa: SLF001
        options._timeout = timedelta(seconds=CONNECT_S / _TIMES)  # noqa: SLF001
        options._threads = 0  # noqa: SLF001 - they serve collective calls, of which there are none
        self._store = OwnStore()
        self.group = _ProcessGroup(self._store, own, 2, options)
        ((key, self._told),) = self._store.values.items()
        self._peers_key = key.removesuffix(str(own)) + str(peer)
        self._ip, self._port = _places(self._told)
        self.address: Address = self._told[self._ip], int.from_bytes(self._told[self._port])

    def find(self, address: Address) -> None:
        """Stores the address of the other side, in the form that Gloo stated for this side."""
        told = bytearray(self._told)
        told[self._ip], told[self._port] = address[0], address[1].to_bytes(2)
        self._store.values[self._peers_key] = bytes(told)


def _places(told: bytes) -> tuple[slice, slice]:
    """Returns the slices of a device's address and port in Gloo's description: after a host's name, in a sockaddr."""
    at = _SIZE.size + _SIZE.unpack_from(told)[0]
    at += _SIZE.size
    if at + 28 <= len(told):
        family = int.from_bytes(told[at : at + 2], sys.byteorder)
        if family == socket.AF_INET:
            return slice(at + 4, at + 8), slice(at + 2, at + 4)
        if family == socket.AF_INET6:
            return slice(at + 8, at + 24), slice(at + 2, at + 4)
    raise RuntimeError("this torch's Gloo tells its address in a form that is not known here")


def _until(moment: float) -> timedelta:
    """Returns the time left, but never zero, which Gloo takes for no bound."""
    return timedelta(seconds=max(moment - time.monotonic(), 0.001))


def _at(address: int, nbytes: int) -> torch.Tensor:
    """Returns memory of this process as a tensor that does not own it."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
