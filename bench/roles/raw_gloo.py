"""The baseline of the data path collective: Gloo as users of torch.distributed call it, with nothing around it.

It is a process group of two processes. One sends the whole memory in messages of one size, several of them in flight;
the other receives them in place.
"""

import os
import time
from collections import deque
from datetime import timedelta

import torch
from torch import distributed

from kvgrpc.datapath.host.memory import SharedMemory

MESSAGE_BYTES = 4 << 20
UNDER_WAY = 8
_WAIT = timedelta(seconds=60)
_SENDER, _RECEIVER = 0, 1
_NETWORK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Network of our own servers, which also run on this machine."""


class RawGloo:
    """One side of a group. Both sides make it at the same time, and wait for each other at a path that has no file
    yet.
    """

    def __init__(self, memory: SharedMemory, meeting: str, *, sends: bool) -> None:
        for variable, value in _NETWORK.items():
            os.environ.setdefault(variable, value)
        self._peer = _RECEIVER if sends else _SENDER
        self._call = distributed.isend if sends else distributed.irecv
        self._memory = torch.from_numpy(memory.as_numpy())
        rank = _SENDER if sends else _RECEIVER
        distributed.init_process_group("gloo", f"file://{meeting}", timeout=_WAIT, rank=rank, world_size=2)

    def move(self, message_bytes: int = MESSAGE_BYTES, under_way: int = UNDER_WAY) -> tuple[int, int]:
        """Returns the begin and the end of the move, in nanoseconds of the system's monotonic clock."""
        flying: deque[distributed.Work] = deque()
        began = time.monotonic_ns()
        for first in range(0, len(self._memory), message_bytes):
            if len(flying) == under_way:
                flying.popleft().wait()
            work = self._call(self._memory[first : first + message_bytes], self._peer)
            assert work is not None, "this process is in the group"
            flying.append(work)
        while flying:
            flying.popleft().wait()
        return began, time.monotonic_ns()

    def close(self) -> None:
        """Ends the group."""
        distributed.destroy_process_group()
