"""Path `window`: the source's rank copies what it is asked for into a window, the destination's copies it out.

The path serves host memory of two ranks on one host. It is `collective` with another library: the destination asks by
way of both leads, and the source's lead compares what is asked with the access, so that a peer gets the bytes of its
open accesses alone. No descriptor of the pool leaves the source.

A window is memory of the source that the destination maps read-only. It belongs to one pair of ranks and lasts as long
as their group. It has slots, which are filled in turn. For each message the source sends a notice over a unix socket
once the slot is filled, and the destination sends one back once it has copied the bytes out. So the destination sees
the bytes that it was sent, and nothing else of the source's memory.

The destination's lead is told where the source listens. Whoever connects states the token that the source gave the
destination's lead, and is answered with the token that the destination gave the source's, and with the descriptor.
"""

import contextlib
import fcntl
import hmac
import math
import mmap
import os
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvgrpc.core.values.endpoints import RankEndpoint, WindowEndpoint
from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.asker import credentials
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable
from kvgrpc.datapath.collective.group import PROOF_S, WINDOW, GroupLibrary
from kvgrpc.datapath.collective.messages import Message, copy_rows
from kvgrpc.datapath.collective.path import CollectivePath
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory, check_sealed, is_host
from kvgrpc.datapath.host.own_host import LOOPBACK
from kvgrpc.datapath.own_user import is_own_user
from kvgrpc.datapath.shared_folder import SharedFolder, elsewhere, new_name, place_of
from kvgrpc.open_files import received_with_descriptor

FRAMING = 1
"""Version of how sends are cut and how halves meet. Every change needs another number."""
SLOT_BYTES = 1 << 22
"""Size of a slot, and of the largest message, in bytes. Smaller ones make the two ranks wake each other too often."""
SLOTS = 4
"""Number of slots: the source fills one while the destination empties another."""
WINDOW_BYTES = SLOTS * SLOT_BYTES
_NOTICE = struct.Struct("=QQ")
"""Number of the send, and bytes of the message."""
_BACKLOG = 16
TOKEN_BYTES = 32
_TOKEN, _LISTENS_AT = "token", "socket"
_NAME = re.compile(r"kvgrpc-window-[0-9a-f]{32}")


class WindowPath(CollectivePath):
    """Copies this rank's memory into windows of peers that ask for it, and reads from those of its own."""

    name = "window"
    framing = FRAMING
    message_bytes = SLOT_BYTES

    def __init__(self, memory: SharedMemory | PrivateMemory, folder: SharedFolder | None = None) -> None:
        """`folder`: where ranks of this host meet whose network namespaces differ."""
        if not is_host(memory.segments):
            raise DataPathUnavailable("this rank's memory is on a device")
        super().__init__(memory, LOOPBACK, load=None, backend=WINDOW)
        self._folder = folder

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        super().offer(endpoint, peer)
        return replace(endpoint, window=WindowEndpoint(self._nbytes, FRAMING))

    def _part(self, endpoint: RankEndpoint) -> tuple[str, int, int] | None:
        part = endpoint.window
        return None if part is None else (WINDOW, part.nbytes, part.framing)

    def _check_half(self, values: Values) -> None:
        read_window_half(values, listens=False)

    def _library(self, sends: bool, rendezvous: Rendezvous) -> GroupLibrary:
        return WindowGroup(sends=sends, rendezvous=rendezvous, folder=self._folder)


@dataclass(frozen=True)
class WindowHalf:
    """One half of a group, as the other half must know it."""

    token: bytes
    """Token that the other half states when the two connect."""
    listens_at: str
    """Abstract name of the source's socket; empty for the destination."""

    @property
    def values(self) -> Values:
        """The half in the form that travels."""
        return (_TOKEN, self.token), (_LISTENS_AT, self.listens_at.encode())


def read_window_half(values: Values, *, listens: bool) -> WindowHalf:
    """Returns the peer's half. Raises DataPathFailed for malformed values: a peer names no other socket than one for
    windows.
    """
    found = dict(values)
    if len(values) != len(found) or set(found) != {_TOKEN, _LISTENS_AT}:
        raise DataPathFailed("a half of a window group tells a token and a socket, each once")
    token, name = found[_TOKEN], found[_LISTENS_AT].decode(errors="replace")
    if len(token) != TOKEN_BYTES:
        raise DataPathFailed(f"the token of a half of a window group has {TOKEN_BYTES} bytes")
    if bool(name) != listens or (listens and not _NAME.fullmatch(name)):
        raise DataPathFailed("only the source of a window group listens, at a socket for windows")
    return WindowHalf(token, name)


@dataclass(eq=False)
class WindowLaunch:
    """A message that is in the window, or is awaited there."""

    message: Message
    number: int
    index: int
    """Number of messages before it in the group."""


class WindowGroup:
    """One connected side of a group. Raises DataPathFailed if the other side does not come or its values are not half
    of a group, and DataPathUnavailable if it is not in reach.
    """

    def __init__(self, *, sends: bool, rendezvous: Rendezvous, folder: SharedFolder | None = None) -> None:
        self._sends = sends
        self._folder = folder
        self._launched = 0
        self._landed = 0
        self._memory: SharedMemory | None = None
        """The window, at the source."""
        self._mapping: mmap.mmap | None = None
        """The window, at the destination."""
        token = secrets.token_bytes(TOKEN_BYTES)
        if sends:
            self._connection = self._admit(token, rendezvous)
        else:
            self._connection = self._come(token, rendezvous)

    def launch(self, message: Message, number: int) -> WindowLaunch:
        """Puts a message into its slot, at the source, once the slot is free."""
        launched = WindowLaunch(message, number, self._launched)
        self._launched += 1
        if self._sends:
            while launched.index - self._landed >= SLOTS:
                self._take_receipt()
            copy_rows(message.rows, destination=self._slot(launched.index))
            self._tell(number, message.nbytes)
        return launched

    def land(self, flying: WindowLaunch, stall_s: float) -> None:
        """Waits until the destination has copied a message out of the window. Raises RuntimeError if it does not."""
        self._connection.settimeout(stall_s)
        if self._sends:
            while self._landed <= flying.index:
                self._take_receipt()
            return
        if self._hear() != (flying.number, flying.message.nbytes):
            raise RuntimeError("the source sent another message than it was asked for")
        copy_rows(flying.message.rows, source=self._slot(flying.index))
        self._landed += 1
        self._tell(flying.number, flying.message.nbytes)

    def shut_down(self) -> None:
        """Ends what is in flight: both sides' waits fail. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the window. The source's bytes are erased from it, also for a peer that keeps its mapping."""
        self.shut_down()
        self._connection.close()
        if self._memory is not None:
            self._memory.as_numpy()[:] = 0
            self._memory.close()
        self._base = 0
        if self._mapping is not None:
            with contextlib.suppress(BufferError):
                self._mapping.close()

    # ---- the window

    def _slot(self, index: int) -> int:
        return self._base + index % SLOTS * SLOT_BYTES

    def _take_receipt(self) -> None:
        self._hear()
        self._landed += 1

    def _tell(self, number: int, nbytes: int) -> None:
        try:
            self._connection.send(_NOTICE.pack(number, nbytes))
        except OSError as error:
            raise RuntimeError(f"the other rank is gone: {error}") from error

    def _hear(self) -> tuple[int, int]:
        try:
            heard = self._connection.recv(_NOTICE.size + 1)
        except OSError as error:
            raise RuntimeError(f"the other rank is gone: {error}") from error
        if len(heard) != _NOTICE.size:
            raise RuntimeError("the other rank is gone")
        number, nbytes = _NOTICE.unpack(heard)
        return number, nbytes

    # ---- how the two ranks meet

    def _admit(self, token: bytes, rendezvous: Rendezvous) -> socket.socket:
        """Gives the destination its window, and nobody else."""
        name = new_name("window-")
        with contextlib.ExitStack() as open_for_peer:
            listeners = [open_for_peer.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))]
            listeners[0].bind("\0" + name)
            listeners[0].listen()
            if self._folder is not None:
                with contextlib.suppress(OSError):  # a peer in this network namespace still comes
                    listeners.append(open_for_peer.enter_context(self._folder.listen(name, _BACKLOG)))
                    open_for_peer.callback(self._folder.remove, name)
            peers = read_window_half(rendezvous.exchange(WindowHalf(token, name).values), listens=False)
            connection = _admitted(listeners, token, time.monotonic() + PROOF_S)
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            try:
                memory = SharedMemory.create(WINDOW_BYTES, "kvgrpc-window")
                undo.callback(memory.close)
                memory.seal()
                descriptor = memory.reopen_read_only()
                try:
                    socket.send_fds(connection, [peers.token], [descriptor])
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise DataPathFailed(f"the peer cannot be given its window: {error}") from error
            undo.pop_all()
        self._memory, self._base = memory, memory.segments[0].address
        return connection

    def _come(self, token: bytes, rendezvous: Rendezvous) -> socket.socket:
        """Fetches the window from the source."""
        began = time.monotonic()
        peers = read_window_half(rendezvous.exchange(WindowHalf(token, "").values), listens=True)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(PROOF_S)
            with place_of(peers.listens_at, self._folder) as place:
                connection.connect(place)
            if not is_own_user(credentials(connection)[1]):
                raise DataPathUnavailable("the other rank is of another user")
            connection.send(peers.token)
            said, descriptors = received_with_descriptor(connection, TOKEN_BYTES + 1)
            try:
                if not hmac.compare_digest(said, token) or len(descriptors) != 1:
                    raise DataPathFailed("who listens for this rank is not the peer's")
                self._mapping = _map_window(descriptors[0])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except OSError as error:
            connection.close()
            why = f"the peer's window cannot be fetched: {error}"
            # The source listens for this long at least: a later refusal says that this rank came late.
            if isinstance(error, ConnectionRefusedError) and time.monotonic() - began < PROOF_S:
                raise DataPathUnavailable(why + elsewhere(self._folder)) from error
            raise DataPathFailed(why) from error
        except BaseException:
            connection.close()
            raise
        self._base = int(np.frombuffer(self._mapping, np.uint8).ctypes.data)
        return connection


def _admitted(listeners: Sequence[socket.socket], token: bytes, until: float) -> socket.socket:
    """Returns the peer's connection. Every process of the host sees the socket's name, so others are sent away until
    the peer comes. Raises DataPathFailed if it does not come.
    """
    waits, by_number = select.poll(), {listener.fileno(): listener for listener in listeners}
    for number in by_number:
        waits.register(number, select.POLLIN)
    try:
        while (left_s := until - time.monotonic()) > 0:
            ready = waits.poll(math.ceil(left_s * 1000))
            if not ready:
                break
            listener = by_number[ready[0][0]]
            listener.settimeout(left_s)
            connection, _ = listener.accept()
            connection.settimeout(left_s)
            if is_own_user(credentials(connection)[1]) and hmac.compare_digest(_received(connection), token):
                connection.settimeout(PROOF_S)
                return connection
            connection.close()
    except OSError as error:
        raise DataPathFailed(f"the other rank did not come: {error}") from error
    raise DataPathFailed("the other rank did not come")


def _received(connection: socket.socket) -> bytes:
    """Returns what a process states; empty if it is gone or says nothing."""
    try:
        return connection.recv(TOKEN_BYTES + 1)
    except OSError:
        return b""


def _map_window(descriptor: int) -> mmap.mmap:
    """Maps the window read-only. Raises DataPathUnavailable for a descriptor that is no window to read safely."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            raise ValueError("it is writable")
        check_sealed(descriptor)
        if os.fstat(descriptor).st_size < WINDOW_BYTES:
            raise ValueError("it is too small")
        return mmap.mmap(descriptor, WINDOW_BYTES, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise DataPathUnavailable(f"the peer's descriptor is no window: {error}") from error
