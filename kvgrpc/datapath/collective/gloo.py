"""Gloo: a process group over TCP, for host memory. Imports torch, so only the thread of a group imports it.

Messages go by several connections in turn, each with a thread of Gloo's at either side: while one of them ends a
message and looks for the next, the other one moves bytes.

Gloo connects whoever comes first to its port, and knows no secret. So each side tells the other one a token, by way of
their leads, and hears it from who is connected before anything is sent or received. Of what the other side tells only
ports and addresses reach Gloo, in a form that Gloo itself made.

Each connection has a device of Gloo's, which listens and has a thread, and it is one that connects late ("lazy"): only
such a group stops its device before it forgets its connections. Otherwise who comes after a group has given up is
connected to memory that is somebody else's by then; and so a device is never used again for another group either.

Gloo gives its caller no way to end a send or receive that is under way but to wait, and a wait that runs out closes the
connection. `connection.shut_down` closes it sooner. Nor does Gloo ever end a group that has bytes to move for a send or
receive that is forgotten: so each is waited for, whatever went wrong before.
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

import numpy as np
import torch
from torch import distributed

from kvgrpc.datapath.collective.connection import (
    admit_nobody_else,
    bound_what_is_unsent,
    connections,
    shut_down,
    sockets,
)
from kvgrpc.datapath.collective.group import PROOF_S, RECEIVER, SENDER
from kvgrpc.datapath.collective.half import CONNECTIONS, TOKEN_BYTES, Address, Half, read_half
from kvgrpc.datapath.collective.messages import PACKED_BYTES_MAX, Message
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.collective.store import OwnStore
from kvgrpc.datapath.copy.copying import best, copier
from kvgrpc.datapath.host.addresses import Rows

_ProcessGroup: Any = distributed.ProcessGroupGloo  # whose methods have no types

_TAGS = (1 << 31) - 1
"""Gloo's tags are numbers below this, for sends; and this, for tokens."""
CONNECT_S = PROOF_S
"""How long a connection may take to be made."""
END_S = 1.0
"""How long the library may take to end what is under way by connections that are over. Then waiting closes these."""
_TIMES = 5
"""Gloo waits so many times as long for a connection as it was told."""
_SIZE = struct.Struct("=Q")
"""Before each thing that Gloo tells of a device: its host's name, and then its address."""


@dataclass(eq=False)
class Flying:
    """A message that the library has."""

    work: Any
    message: Message
    buffer: torch.Tensor


class GlooGroup:
    """One side of a group, connected. `host`: the address at which it listens. Raises RuntimeError when the other side
    does not come, and DataPathFailed when what it tells is no half of a group.
    """

    def __init__(self, *, sends: bool, host: str, rendezvous: Rendezvous) -> None:
        self._sends = sends
        self._spare: list[torch.Tensor] = []
        """Buffers of messages that travel packed."""
        self._works: deque[Any] = deque()
        """Sends and receives that nobody has waited for yet, in their order; for each the library ends one wait."""
        self._launched = (0, 0)
        """The send that was launched last, and how many of its messages were."""
        before = sockets()
        own, self._peer = (SENDER, RECEIVER) if sends else (RECEIVER, SENDER)
        made = [_Connection(own, self._peer, host) for _ in range(CONNECTIONS)]
        half = Half(secrets.token_bytes(TOKEN_BYTES), tuple(connection.address for connection in made))
        peers = read_half(rendezvous.exchange(half.values), host)
        try:
            self._connect(made, half, peers)
        except RuntimeError:
            self._sockets = connections(half.addresses, peers.addresses, before)
            self.close()
            raise
        self._connected = made
        self._sockets = connections(half.addresses, peers.addresses, before)
        admit_nobody_else(half.addresses, before)
        if sends:
            bound_what_is_unsent(self._sockets)

    def launch(self, message: Message, number: int) -> Flying:
        """Hands a message of the send of that number to the library: it meets none of another one."""
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
                _copy(message.rows, destination=buffer.data_ptr())
            work = group.send([part], self._peer, tag)
        self._works.append(work)
        return Flying(work, message, buffer)

    def land(self, flying: Flying, stall_s: float) -> None:
        """Waits until a message has moved, in the order in which they were launched. Raises RuntimeError when it does
        not.
        """
        self._works.popleft()
        flying.work.wait(timedelta(seconds=stall_s))
        if not flying.message.address:
            if not self._sends:
                _copy(flying.message.rows, source=flying.buffer.data_ptr())
            if len(flying.buffer) == PACKED_BYTES_MAX:
                self._spare.append(flying.buffer)

    def shut_down(self) -> None:
        """Ends what is under way, by its connections. From any thread."""
        shut_down(self._sockets)

    def close(self) -> None:
        """Ends it, and waits for the ends of what was launched."""
        self.shut_down()
        give_up_at = time.monotonic() + END_S
        while self._works:
            with suppress(RuntimeError):
                self._works.popleft().wait(_until(give_up_at))

    def _connect(self, made: list["_Connection"], own: Half, peers: Half) -> None:
        """Raises RuntimeError unless the other side comes, at each connection."""
        give_up_at = time.monotonic() + PROOF_S
        for connection, address in zip(made, peers.addresses, strict=True):
            if time.monotonic() > give_up_at:
                raise RuntimeError("the other rank took too long to come")
            connection.find(address)
            self._prove(connection.group, own.token, peers.token, give_up_at)

    def _prove(self, connected: Any, own: bytes, peers: bytes, give_up_at: float) -> None:
        """Raises RuntimeError unless who is connected knows what the peer's lead was told."""
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
        """A run that crosses the end of an allocation may be longer than what is packed of short ones."""
        if nbytes <= PACKED_BYTES_MAX and self._spare:
            return self._spare.pop()
        return torch.empty(max(nbytes, PACKED_BYTES_MAX), dtype=torch.uint8)


class _Connection:
    """A group of the library's, for one connection, which is made by the first message. Raises RuntimeError where the
    library tells its address in a form that is not known here.
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
        """Where the other side listens: what this one told, but for that."""
        told = bytearray(self._told)
        told[self._ip], told[self._port] = address[0], address[1].to_bytes(2)
        self._store.values[self._peers_key] = bytes(told)


def _places(told: bytes) -> tuple[slice, slice]:
    """Where the address and the port of a device are in what Gloo tells of it: after a host's name, in a sockaddr."""
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
    """Gloo takes none for no bound."""
    return timedelta(seconds=max(moment - time.monotonic(), 0.001))


def _copy(rows: Rows, *, source: int = 0, destination: int = 0) -> None:
    """Copies rows of which one side's addresses are offsets in a buffer, which begins there."""
    copy = copier(best(float(rows[:, 2].mean())))
    assert copy is not None, "it is among those that work"
    copy(np.ascontiguousarray(rows + np.array([destination, source, 0])))


def _at(address: int, nbytes: int) -> torch.Tensor:
    """Memory of this process as a tensor that does not own it."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
