"""Gloo: a process group over TCP, for host memory. Imports torch, so only the thread of a group imports it.

Messages go by several connections in turn, each with a thread of Gloo's at either side: while one of them ends a
message and looks for the next, the other one moves bytes.

Gloo connects whoever comes first to its port, and knows no secret. So each side tells the other one a token, by way of
their leads, and hears it from who is connected before anything is sent or received.

Gloo gives its caller no way to end a send or receive that is under way but to wait, and a wait that runs out closes the
connection. `connection.shut_down` closes it sooner.
"""

import ctypes
import hmac
import secrets
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed

from kvgrpc.datapath.collective.connection import bound_what_is_unsent, connections, shut_down, sockets
from kvgrpc.datapath.collective.group import PROOF_S, RECEIVER, SENDER
from kvgrpc.datapath.collective.messages import PACKED_BYTES_MAX, Message
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.collective.store import RendezvousStore
from kvgrpc.datapath.copy.copying import best, copier
from kvgrpc.datapath.host.addresses import Rows

_ProcessGroup: Any = distributed.ProcessGroupGloo  # whose methods have no types

_TAGS = (1 << 31) - 1
"""Gloo's tags are numbers below this, for sends; and this, for tokens."""
TOKEN_BYTES = 32
CONNECTIONS = 2
"""Of a group."""


@dataclass(eq=False)
class Flying:
    """A message that the library has."""

    work: Any
    message: Message
    buffer: torch.Tensor


class GlooGroup:
    """One side of a group, connected. `host`: the address at which it listens. Raises RuntimeError when the other side
    does not come.
    """

    def __init__(self, *, sends: bool, host: str, rendezvous: Rendezvous, wait_s: float) -> None:
        self._sends = sends
        self._spare: list[torch.Tensor] = []
        """Buffers of messages that travel packed."""
        self._launched = (0, 0)
        """The send that was launched last, and how many of its messages were."""
        before = sockets()
        own, self._peer = (SENDER, RECEIVER) if sends else (RECEIVER, SENDER)
        token = secrets.token_bytes(TOKEN_BYTES)
        rendezvous.put(_token_of(own), token)
        self._connected = _connect(own, host, rendezvous, wait_s)
        peers = rendezvous.take(_token_of(self._peer))
        for connected in self._connected:
            self._prove(connected, token, peers)
        self._sockets = connections(*rendezvous.both, before)
        if sends:
            bound_what_is_unsent(self._sockets)

    def launch(self, message: Message, number: int) -> Flying:
        """Hands a message of the send of that number to the library: it meets none of another one."""
        send, index = self._launched
        index = index if send == number else 0
        self._launched = number, index + 1
        group = self._connected[index % CONNECTIONS]
        buffer = _at(message.address, message.nbytes) if message.address else self._buffer(message.nbytes)
        part, tag = buffer[: message.nbytes], number % _TAGS
        if not self._sends:
            return Flying(group.recv([part], self._peer, tag), message, buffer)
        if not message.address:
            _copy(message.rows, destination=buffer.data_ptr())
        return Flying(group.send([part], self._peer, tag), message, buffer)

    def land(self, flying: Flying, stall_s: float) -> None:
        """Waits until a message has moved, in the order in which they were launched. Raises RuntimeError when it does
        not.
        """
        flying.work.wait(timedelta(seconds=stall_s))
        if not flying.message.address:
            if not self._sends:
                _copy(flying.message.rows, source=flying.buffer.data_ptr())
            if len(flying.buffer) == PACKED_BYTES_MAX:
                self._spare.append(flying.buffer)

    def shut_down(self) -> None:
        """Ends what is under way, by its connections. From any thread."""
        shut_down(self._sockets)

    def _prove(self, connected: Any, own: bytes, peers: bytes) -> None:
        """Raises RuntimeError unless who is connected knows what the peer's lead was told."""
        said, heard = torch.frombuffer(bytearray(peers), dtype=torch.uint8), torch.zeros(TOKEN_BYTES, dtype=torch.uint8)
        sending, hearing = connected.send([said], self._peer, _TAGS), connected.recv([heard], self._peer, _TAGS)
        give_up_at = time.monotonic() + PROOF_S
        hearing.wait(timedelta(seconds=PROOF_S))
        if not hmac.compare_digest(heard.numpy().tobytes(), own):
            raise RuntimeError("who connected to this rank is not the peer's")
        sending.wait(timedelta(seconds=max(give_up_at - time.monotonic(), 0.001)))

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """A run that crosses the end of an allocation may be longer than what is packed of short ones."""
        if nbytes <= PACKED_BYTES_MAX and self._spare:
            return self._spare.pop()
        return torch.empty(max(nbytes, PACKED_BYTES_MAX), dtype=torch.uint8)


def _connect(own: int, host: str, rendezvous: Rendezvous, wait_s: float) -> list[Any]:
    """A group of the library's for each connection. All are made at once, since what they tell goes to the other side
    together.
    """
    all_put = threading.Barrier(CONNECTIONS)
    made: dict[int, Any] = {}
    failed: list[Exception] = []

    def connect(index: int) -> None:
        options = _ProcessGroup._Options()  # noqa: SLF001 - the only way to say where it listens
        options._devices = [_ProcessGroup.create_device(hostname=host)]  # noqa: SLF001
        options._timeout = timedelta(seconds=wait_s)  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        made[index] = _ProcessGroup(RendezvousStore(rendezvous, f"{index}/", all_put.wait), own, 2, options)

    def run(index: int) -> None:
        try:
            connect(index)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the group
            failed.append(error)
            all_put.abort()  # nobody waits for this one

    # Daemons: a process that ends while the other side does not come waits for nobody.
    threads = [threading.Thread(target=run, args=(i,), name="kvgrpc-connect", daemon=True) for i in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        made.clear()  # a connection that was made goes now, not with the error
        raise failed.pop(0)
    return [made[index] for index in range(CONNECTIONS)]


def _token_of(side: int) -> str:
    return f"token/{side}"


def _copy(rows: Rows, *, source: int = 0, destination: int = 0) -> None:
    """Copies rows of which one side's addresses are offsets in a buffer, which begins there."""
    copy = copier(best(float(rows[:, 2].mean())))
    assert copy is not None, "it is among those that work"
    copy(np.ascontiguousarray(rows + np.array([destination, source, 0])))


def _at(address: int, nbytes: int) -> torch.Tensor:
    """Memory of this process as a tensor that does not own it."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
