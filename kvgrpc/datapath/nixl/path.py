"""Data path `nixl`: reads and writes a peer's memory with NIXL (UCX by default), between hosts and within one.

NIXL is imported when the first `NixlPath` is made. The rules:

* One agent per rank, without NIXL's progress thread, which burns a whole core while idle. Bytes
  move only while its functions are called: `poll` on the side that posted, `progress` on the other. Nothing
  here sleeps, waits for a peer or starts a thread.
* An agent ends in one order: transfers, peers, memory, agent. `close` keeps to it at any time, with
  transfers pending and peers dead; a finalizer does the same for a path that was not closed.
* DONE is what the transfer itself states; FAILED only if nothing can follow (`NixlPosting`).
* The time from which a peer's write cannot land differs by transport (`NixlPath.late_writes`).
* A peer's metadata is checked in full before NIXL sees it (`nixl_metadata`).

TCP is refused unless UCX_TLS names it. Over TCP, UCX has the process that is read send the bytes. If the reader dies
meanwhile, or closes, that process dies with it: signal 6 or 11 inside UCX 1.23 ("Fatal: unexpected error: Endpoint
timeout"), in every trial, with one read of 8 KB in flight as with many. RDMA and CMA do not involve the process that is
read, and no write harmed either end.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvgrpc.core.actions import Operation
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import NixlEndpoint, RankEndpoint, Segment
from kvgrpc.datapath.base import Buffer, DataPathFailed, DataPathUnavailable, Memory, PostingState
from kvgrpc.datapath.host import addresses
from kvgrpc.datapath.host.memory import memory_bytes
from kvgrpc.datapath.host.process import HeldProcess, OwnProcess, digest, prove
from kvgrpc.datapath.host.process_socket import ProcessSocket
from kvgrpc.datapath.nixl import ucx_log
from kvgrpc.datapath.nixl.agent import NixlAgent, NixlTransfer
from kvgrpc.datapath.nixl.load import BACKEND
from kvgrpc.datapath.nixl.posting import SLICE_BYTES, NixlPosting, NixlSlice, slices
from kvgrpc.datapath.questions import Answer, Question


class NixlPath:
    """Implements `DataPath` for one rank's memory.

    `hint` begins the agent's name, for logs. Peers ask this process at `socket`, which all paths of a rank share.
    Raises DataPathUnavailable if NIXL or its `backend` is missing or cannot register the memory. The memory must stay
    mapped until `close` returned: over TCP this process's own calls read it for the peers and would end in a fault.
    """

    def __init__(
        self, memory: Memory, hint: str = "kvgrpc", backend: str = BACKEND, *, socket: ProcessSocket | None = None
    ) -> None:
        self._made_with = memory, hint, backend
        self._socket = socket or ProcessSocket()
        self._process = OwnProcess(memory, self._socket)
        self._begin()

    def _begin(self) -> None:
        self._agent = NixlAgent(*self._made_with)
        # The finalizer also runs when the interpreter ends. Otherwise the order of the ends would be random, and NIXL
        # faults.
        self._finalizer = weakref.finalize(self, self._agent.close)

    @property
    def name(self) -> str:
        return "nixl"

    @property
    def needs_polling(self) -> bool:
        return True

    @property
    def peers_need_turns(self) -> bool:
        return not self._agent.written_by_callers

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        """Returns `endpoint` with this agent and its registered memory, and with the process for this peer to hold."""
        if self._agent.closed:
            raise DataPathUnavailable("the data path is closed")
        part = self._agent.endpoint
        with contextlib.suppress(DataPathUnavailable):
            part = replace(part, process=self._process.offer(peer, self.name, _digest(part)))
        return replace(endpoint, nixl=part)

    def withdraw(self, peer: str) -> None:
        self._socket.revoke(peer)

    def question(self, endpoint: RankEndpoint) -> Question | None:
        """Returns the question by which the end of the peer's process can be seen. NIXL also connects without it."""
        process = None if endpoint.nixl is None else endpoint.nixl.process
        return None if process is None else self._socket.question(process.socket_path, process.token)

    def connect(self, endpoint: RankEndpoint, answer: Answer | str) -> "NixlRemote":
        """Loads the peer's agent (10 ms). The two exchange nothing before the first read.

        Raises DataPathUnavailable for metadata that is malformed or not of that endpoint, for a peer that is connected
        already, and for one that no transport reaches, or only TCP unasked.
        """
        if endpoint.nixl is None:
            raise DataPathUnavailable(f"rank {endpoint.rank} does not offer NIXL")
        lanes = self._agent.add_peer(endpoint.nixl)
        process: HeldProcess | None = None
        with contextlib.suppress(DataPathUnavailable):
            process = prove(answer, _digest(endpoint.nixl))
        return NixlRemote(self._agent, endpoint.nixl, lanes, process)

    def progress(self) -> None:
        """Serves what peers have sent so far: 2 us if that is nothing. Does nothing when closed."""
        self._agent.progress()

    def close(self) -> None:
        """Ends transfers, peers, registrations and the agent. Idempotent.

        Afterwards no access of ours follows, also none of pending postings: late bytes of a read from a stopped peer
        arrive only while the agent lives. Raises DataPathFailed if another thread's call into NIXL does not return.
        """
        self._socket.close()
        self._finalizer()

    @property
    def late_writes(self) -> str:
        """See `WrittenByPeers`. Experiments (NIXL 1.5.1, UCX 1.23, host memory) showed:

        * TCP: this process writes what it received. The bytes of a peer that was stopped or killed
          land while the agent lives, also after `remote.close`; nothing lands after the agent's end.
        * CMA: the peer's process writes, and needs nothing of this one. A peer that was stopped
          within a write goes on with it after this agent's end. Nothing follows the end of its process.

        Nothing was shown for other transports.
        """
        return self._agent.late_writes()

    @property
    def ends_with_process(self) -> bool:
        return self._agent.written_by_callers

    def rekey(self) -> None:
        """Makes a new agent, under a new name, in place of this one. See `WrittenByPeers`."""
        self._finalizer()
        self._begin()


class NixlRemote:
    """Implements `WritableRemote`, and `AgentConnection` for its postings.

    UCX gives a connection up for good at its first error: later postings raise DataPathFailed, and only `close` and a
    new `connect` make another.
    """

    def __init__(
        self, agent: NixlAgent, peer: NixlEndpoint, lanes: ucx_log.LaneSets, process: HeldProcess | None
    ) -> None:
        self._agent = agent
        self._peer = peer
        self._lanes = lanes
        self._broken = ""
        self._closed = False
        self._process = process

    @property
    def process(self) -> HeldProcess | None:
        return self._process

    @property
    def why(self) -> str:
        transports = " or ".join(" and ".join(lanes) for lanes in self._lanes)
        return f"NIXL over {self._peer.backend} by {transports or 'a transport that it does not name'}"

    def read(self, runs: Runs, wake: Callable[[], None]) -> NixlPosting:
        """Posts the first slice; `poll` posts the others.

        Calls `wake` if the next `poll` can post at once, because the slice was over before NIXL returned.
        """
        return self._start(runs, Operation.READ, wake)

    def read_into(self, buffer: Buffer, runs: Runs, wake: Callable[[], None]) -> NixlPosting:
        """Does what `read` does, into a buffer. The first call since the agent began registers the arena."""
        self._check_usable()
        self._agent.register_arena(buffer)
        return self._start(runs, Operation.READ, wake, own=(buffer.segment,))

    def read_slices(
        self, runs: Runs, ends: Sequence[int], arrived: Callable[[int], None], wake: Callable[[], None]
    ) -> NixlPosting:
        """Does what `read` does. A slice of the caller's is one or more of NIXL's."""
        return self._start(runs, Operation.READ, wake, ends, arrived)

    def write(self, runs: Runs, wake: Callable[[], None]) -> NixlPosting:
        """Does what `read` does, in the other direction."""
        return self._start(runs, Operation.WRITE, wake)

    def close(self) -> None:
        """Forgets the peer. Idempotent. Raises DataPathFailed while a transfer with the peer is running."""
        if not self._closed:
            self._agent.remove_peer(self._peer.agent)
            self._closed = True

    @property
    def lock(self) -> threading.RLock:
        return self._agent.lock

    @property
    def closed(self) -> bool:
        return self._agent.closed

    def prepare(self, piece: NixlSlice, operation: Operation) -> NixlTransfer:
        self._check_usable()
        return self._agent.prepare(self._peer.agent, piece, operation)

    def broke(self, error: str, operation: Operation) -> PostingState:
        self._broken = self._broken or error
        return self._agent.after_an_error(operation)

    def after_close(self, operation: Operation) -> PostingState:
        return self._agent.after_close(operation)

    def _start(
        self,
        runs: Runs,
        operation: Operation,
        wake: Callable[[], None],
        ends: Sequence[int] = (),
        arrived: Callable[[int], None] | None = None,
        *,
        own: Sequence[Segment] = (),
    ) -> NixlPosting:
        own, there = own or self._agent.endpoint.segments, self._peer.segments
        source, destination = (there, own) if operation is Operation.READ else (own, there)
        addresses.check_runs(runs, memory_bytes(source), memory_bytes(destination))
        self._check_usable()
        rows = addresses.to_rows(runs, source, destination, SLICE_BYTES)
        if operation is Operation.WRITE:
            rows = rows[:, [1, 0, 2]]  # a slice has its own address first
        posting = NixlPosting(self, slices(rows, own, there, ends), wake, operation, arrived)
        posting.poll()
        return posting

    def _check_usable(self) -> None:
        if self._closed or self._agent.closed:
            raise DataPathFailed(f"the connection to agent {self._peer.agent!r} is closed")
        if self._broken:
            raise DataPathFailed(f"the connection to agent {self._peer.agent!r} broke before: {self._broken}")


def _digest(part: NixlEndpoint) -> bytes:
    """Returns the digest of an endpoint's offer, by which the writing process proves to be the one that made it."""
    return digest(part.segments, part.agent.encode(), part.backend.encode(), part.metadata)
