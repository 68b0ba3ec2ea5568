"""Path `window`: the source's rank copies what it is asked for into a window, the destination's copies it out.

The path serves host memory of two ranks on one host. It is `collective` with another library: the destination asks by
way of both leads, and the source's lead compares what is asked with the access, so that a peer gets the bytes of its
open accesses alone. No descriptor of the pool leaves the source.
"""

from dataclasses import replace

from kvgrpc.core.values.endpoints import RankEndpoint, WindowEndpoint
from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.collective.group import WINDOW, GroupLibrary
from kvgrpc.datapath.collective.path import CollectivePath
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory, is_host
from kvgrpc.datapath.host.own_host import LOOPBACK
from kvgrpc.datapath.shared_folder import SharedFolder
from kvgrpc.datapath.window.group import SLOT_BYTES, WindowGroup
from kvgrpc.datapath.window.half import read_window_half

FRAMING = 1
"""Version of how sends are cut and how halves meet. Every change needs another number."""


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
