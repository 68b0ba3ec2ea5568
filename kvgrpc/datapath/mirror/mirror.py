"""The mirror of a rank: host memory as large as the rank's own, which no data path reaches.

Data paths only know the mirror. Handed-over blocks are copied out of the device before a peer may read them; the bytes
of a posting are copied into the device before the posting ends. Copies out run one after the other, in the order of
their requests, so that an old one never overwrites a newer one. No posting begins to read into bytes for which a copy
out is still to come: the hand-over that requested it has ended then, and its blocks belong to others.
"""

import logging
import threading
import time
from collections.abc import Callable

from kvgrpc.core.events import CopiedOut
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.datapath.base import DataPathFailed, Posting
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.datapath.mirror.device import Device
from kvgrpc.datapath.mirror.lane import CopyJob, CopyLane
from kvgrpc.datapath.mirror.ranges import Ranges
from kvgrpc.errors import KVGrpcError

_log = logging.getLogger(__name__)

Report = Callable[[CopiedOut], None]


def make_memory(device: Device) -> SharedMemory:
    """Makes memory for a mirror of `device`, and opens the device with it; no other process can write it.

    Raises Exhausted if the host has none, and what `Device.open` raises; no memory is left then.
    """
    memory = SharedMemory.create(device.nbytes)
    try:
        device.open(memory.as_numpy())
    except BaseException:
        memory.close()
        raise
    memory.seal()
    return memory


class Mirror:
    """Mirrors `device` in `memory`, with which the device is open until `close`. `report` is called from the mirror's
    own threads. Nothing here blocks except `close`.
    """

    def __init__(self, rank: int, memory: SharedMemory, device: Device, report: Report) -> None:
        self._rank = rank
        self._nbytes = memory.nbytes
        self._device = device
        self._report = report
        self._lock = threading.Lock()  # guards the next two
        self._coming: dict[CopyJob, Ranges] = {}
        """Copies out that have not ended, or were lost."""
        self._waiting: set[Callable[[], None]] = set()
        """Callbacks for the end of a copy out. A callback that is added several times is called once."""
        self._out = CopyLane(f"kvgrpc-out-{rank}")
        self._in = CopyLane(f"kvgrpc-in-{rank}")

    def copy_out(self, name: str, pieces: Pieces) -> None:
        """Copies these bytes out of the device. CopiedOut of that name always answers."""
        try:
            ranges = Ranges.of(pieces.offsets, pieces.nbytes, self._nbytes)
        except KVGrpcError as error:
            self._report(CopiedOut(self._rank, name, error.message))
            return
        job = CopyJob(ranges.copies(self._device.to_host), lambda: self._copied_out(name, job))
        with self._lock:
            self._coming[job] = ranges
        self._out.copy(job)

    def copy_in(self, ranges: Ranges, wake: Callable[[], None]) -> Posting:
        """Starts to copy bytes that arrived in the mirror into the device."""
        job = CopyJob(ranges.copies(self._device.to_device), wake)
        self._in.copy(job)
        return job

    def is_clear(self, ranges: Ranges, wake: Callable[[], None]) -> bool:
        """Returns True if no copy out may overwrite these bytes of the mirror any more. If not, `wake` is called when
        the caller should ask again. Raises DataPathFailed if that is never proved.
        """
        with self._lock:
            coming = [job for job, filled in self._coming.items() if filled.touches(ranges)]
            if lost := [job for job in coming if job.lost]:
                raise DataPathFailed(f"a copy of the device was lost and may still write there: {lost[0].error}")
            if coming:
                self._waiting.add(wake)
        return not coming

    def close(self, wait_s: float) -> bool:
        """Ends copies after the pieces in flight. Returns True if device and mirror are at rest. Idempotent."""
        deadline = time.monotonic() + wait_s
        lanes = self._out, self._in
        for lane in lanes:
            lane.stop()
        rest = [lane.at_rest(max(deadline - time.monotonic(), 0.0)) for lane in lanes]
        if not all(rest):
            _log.error("the device of rank %d may still copy to its mirror, or from there", self._rank)
            return False
        try:
            self._device.close()
        except Exception:  # noqa: BLE001 - logged, and the mirror stays
            _log.exception("the device of rank %d did not let go of its mirror", self._rank)
            return False
        return True

    def _copied_out(self, name: str, job: CopyJob) -> None:
        with self._lock:
            if not job.lost:
                self._coming.pop(job, None)
            waiting, self._waiting = self._waiting, set()
        self._report(CopiedOut(self._rank, name, job.error))
        for wake in waiting:
            wake()


class OnwardCopy:
    """Bytes of a posting that come into a mirror and go on to the device. Only the mover's thread uses it."""

    def __init__(self, mirror: Mirror, ranges: Ranges) -> None:
        self._mirror = mirror
        self._ranges = ranges
        self._clear = False
        self.begun = False
        """True once the bytes are in the mirror and on their way from there: no data path has a part in it any more."""

    def may_come(self, wake: Callable[[], None]) -> bool:
        """Returns True if bytes may come into the mirror now. If not, `wake` is called when the caller should ask
        again. Raises as `Mirror.is_clear` does.
        """
        self._clear = self._clear or self._mirror.is_clear(self._ranges, wake)
        return self._clear

    def start(self, wake: Callable[[], None]) -> Posting:
        self.begun = True
        return self._mirror.copy_in(self._ranges, wake)
