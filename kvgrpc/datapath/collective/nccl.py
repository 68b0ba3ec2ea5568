"""NCCL: a process group for memory of CUDA devices. The module imports torch, so only a group's thread imports it.

The code follows the documentation of torch and NCCL; no GPU has run it (`tests/gpu/test_collective.py`). Runs need no
packing: the runs of one message are handed over as one group of calls. The thread polls for the end of each message,
since NCCL's own wait makes only the device wait.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.collective.group import RECEIVER, SENDER
from kvgrpc.datapath.collective.messages import Message
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.collective.rendezvous_store import RendezvousStore

LOOK_S = 0.00005
"""Interval between looks for the end of a message, in seconds."""
_cuda: Any = torch.cuda  # untyped in part


@dataclass(eq=False)
class NcclLaunch:
    """A message that the library has."""

    work: Any


class _Bytes:
    """Memory of a device, in a form that torch takes over without owning it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class NcclGroup:
    """One connected side of a group. Raises DataPathFailed if the other side does not come."""

    def __init__(self, *, sends: bool, device: int, rendezvous: Rendezvous) -> None:
        self._sends = sends
        self._device = torch.device("cuda", device)
        self._looks = threading.Event()  # never set: only its timed wait is used
        _cuda.set_device(self._device)  # for this thread
        process_group: Any = distributed.ProcessGroupNCCL
        try:
            self._group = process_group(
                RendezvousStore(rendezvous), SENDER if sends else RECEIVER, 2, process_group.Options()
            )
            self._group.eager_connect_single_device(self._device)
        except RuntimeError as error:  # the library does not say whose fault it is
            raise DataPathFailed(str(error)) from error

    def launch(self, message: Message, _: int) -> NcclLaunch:
        """Hands a message to the library, run by run, as one group of calls. NCCL has no tags, only their order."""
        self._group._start_coalescing(self._device)  # noqa: SLF001 - has no public name
        for row in message.rows.tolist():
            part = torch.as_tensor(_Bytes(row[1] if self._sends else row[0], row[2]), device=self._device)
            if self._sends:
                self._group.send([part], RECEIVER, 0)
            else:
                self._group.recv([part], SENDER, 0)
        return NcclLaunch(self._group._end_coalescing(self._device))  # noqa: SLF001 - likewise

    def land(self, flying: NcclLaunch, stall_s: float) -> None:
        """Waits until a message has moved. Raises RuntimeError if it does not; then no access of it follows."""
        end = time.monotonic() + stall_s
        while not flying.work.is_completed():
            if time.monotonic() > end:
                self.shut_down()
                raise RuntimeError(f"Timed out waiting {stall_s:g} s for NCCL")
            self._looks.wait(LOOK_S)
        if not flying.work.is_success():
            raise RuntimeError(str(flying.work.exception()))

    def shut_down(self) -> None:
        """Ends what is in flight: kernels of the group return, or never start. Any thread may call it."""
        self._group.abort()

    def close(self) -> None:
        """Does nothing: `shut_down` aborts what is in flight."""
