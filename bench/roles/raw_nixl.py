"""The baseline of every transfer between two processes: NIXL as its users call it, with nothing around it.

There is one agent per process. A read or write is the minimum: descriptor lists from arrays of addresses, one transfer
made of them and posted, and its state polled until it is DONE.
"""

import secrets
import threading
import time

import numpy as np

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, Memory
from kvgrpc.datapath.host.addresses import to_rows
from kvgrpc.datapath.nixl import load

_BACKEND = "UCX"
_WHOLE = 1 << 62
POLL_S = 0.0001


class RawNixl:
    """An agent with `memory` registered, progressed by NIXL's progress thread or by `poll`."""

    def __init__(self, memory: Memory, progress_thread: bool) -> None:
        api = load.nixl()
        self._memory = memory
        self.name = f"bench-{secrets.token_hex(4)}"
        try:
            config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[_BACKEND])
            self._agent = api.nixl_agent(self.name, config)
            regions = [(segment.address, segment.nbytes, 0, "") for segment in memory.segments]
            self._registered = self._agent.register_memory(regions, "DRAM", [_BACKEND])
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL's errors have no other base
            raise DataPathUnavailable(f"NIXL does not start: {error}") from error
        self._peers: list[str] = []
        self._polling: threading.Event | None = None
        self._poller: threading.Thread | None = None

    def connect(self, metadata: bytes) -> None:
        """Loads the agent of a peer."""
        name = self._agent.add_remote_agent(metadata)
        self._peers.append(name.decode() if isinstance(name, bytes) else name)

    def move(self, operation: str, runs: Runs, there: tuple[Segment, ...]) -> float:
        """Moves `runs` by READ out of the peer's memory, which has the segments `there`, or by WRITE into it.

        Returns seconds.
        """
        here = self._memory.segments
        own, remote = (0, 1) if operation == "READ" else (1, 0)  # columns: destination, source
        rows = to_rows(runs, there, here, _WHOLE) if operation == "READ" else to_rows(runs, here, there, _WHOLE)
        mine, theirs = (np.zeros((len(rows), 3), dtype=np.uint64) for _ in range(2))
        mine[:, 0], theirs[:, 0] = rows[:, own], rows[:, remote]
        mine[:, 1] = theirs[:, 1] = rows[:, 2]
        agent, peer = self._agent, self._peers[-1]
        began = time.monotonic()
        lists = agent.get_xfer_descs(mine, "DRAM"), agent.get_xfer_descs(theirs, "DRAM")
        handle = agent.initialize_xfer(operation, *lists, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.monotonic() - began
        if state != "DONE":
            raise DataPathFailed(f"NIXL answered {state}")
        agent.release_xfer_handle(handle)
        return seconds

    def poll(self, on: bool) -> None:
        """Starts a thread that makes progress for peers every 100 us, or stops it."""
        if self._polling is not None and self._poller is not None:
            self._polling.set()
            self._poller.join()
            self._polling = None
        if on:
            self._polling = threading.Event()
            self._poller = threading.Thread(target=self._poll, args=(self._polling,), daemon=True)
            self._poller.start()

    def close(self) -> None:
        """Ends everything in the order that NIXL needs."""
        self.poll(False)
        for peer in self._peers:
            self._agent.remove_remote_agent(peer)
        self._agent.deregister_memory(self._registered)
        self._agent.agent = None

    def _poll(self, ended: threading.Event) -> None:
        while not ended.wait(POLL_S):
            self._agent.get_new_notifs()
