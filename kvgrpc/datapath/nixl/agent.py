"""The NIXL agent of a rank: its registered memory, its peers and its transfers."""

import contextlib
import ctypes
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvgrpc.core.actions import Operation
from kvgrpc.core.values.endpoints import NixlEndpoint, Segment
from kvgrpc.datapath.base import Buffer, DataPathFailed, DataPathUnavailable, Memory, PostingState
from kvgrpc.datapath.host.memory import is_host
from kvgrpc.datapath.nixl import load, metadata as nixl_metadata, ucx_log
from kvgrpc.datapath.nixl.posting import NixlSlice, by_type
from kvgrpc.errors import KVGrpcError

_log = logging.getLogger(__name__)

# Time that `close` gives a call of another thread, in seconds: the longest seen was 0.2 s.
_CLOSE_S = 10.0
_UCX_LOG = ucx_log.UcxLog()
_TCP_UNASKED = (
    "UCX reaches agent {!r} over TCP only, where a reader that dies takes the process that it reads from"
    " with it; UCX_TLS=tcp in the environment of both accepts that"
)
# Meaning of the errors by which a peer ends a connection.
_MEANS = {"nixlRemoteDisconnectError": "the peer's agent is gone or the connection to it broke"}


class NixlTransfer:
    """Implements `SliceTransfer` with a handle of NIXL's."""

    def __init__(self, agent: "NixlAgent", peer: str, handle: Any) -> None:
        self.peer = peer
        self._agent = agent
        self._handle = handle

    def post(self) -> tuple[PostingState, str]:
        return self._ask(self._agent.nixl.transfer)

    def check(self) -> tuple[PostingState, str]:
        return self._ask(self._agent.nixl.check_xfer_state)

    def release(self) -> None:
        try:
            self._agent.nixl.release_xfer_handle(self._handle)
        except Exception:  # noqa: BLE001 - NIXL's errors have no other base
            _log.warning("NIXL did not release an ended transfer: kept until the path is closed", exc_info=True)
        else:
            self._agent.transfers.discard(self)

    def drop(self) -> None:
        """Releases the transfer for the last time; what NIXL refuses to release ends with the agent."""
        with contextlib.suppress(Exception):
            self._handle.release()
        # Otherwise the wrapper tries again when it is collected, and until then keeps the agent alive.
        self._handle._released, self._handle._agent = True, None  # noqa: SLF001

    def _ask(self, call: Callable[[Any], object]) -> tuple[PostingState, str]:
        try:
            answer = call(self._handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no other base
            return PostingState.FAILED, _sentence(error)
        if answer == "DONE":
            return PostingState.DONE, ""
        if answer == "PROC":
            return PostingState.PENDING, ""
        return PostingState.FAILED, f"NIXL answered {answer}"


class NixlAgent:
    """The NIXL agent and all that it holds.

    The lock is for the finalizer, which runs in the main thread beside a mover that is a daemon.
    """

    def __init__(self, memory: Memory, hint: str, backend: str) -> None:
        self.lock = threading.RLock()
        self.closed = False
        self.transfers: set[NixlTransfer] = set()
        self._memory = memory  # kept alive: see NixlPath
        self._peers: set[str] = set()
        self._registered: list[Any] = []
        self._arena: object = None
        """Memory of the rank's staging buffers, kept alive once it is registered, too."""
        self._pid = os.getpid()
        name = re.sub(r"[^\w.-]", "_", f"{hint}-{secrets.token_hex(8)}", flags=re.ASCII)[-ucx_log.AGENT_CHARS_MAX :]
        self.nixl = _make_agent(name, backend)
        try:
            with _raising(DataPathUnavailable, "NIXL cannot register the memory"):
                self._register(memory.segments, backend)
                metadata = nixl_metadata.seal(self.nixl.get_agent_metadata())
        except DataPathUnavailable:
            self.close()
            raise
        self.endpoint = NixlEndpoint(name, metadata, backend, memory.segments)
        self._form_is_known = nixl_metadata.form_is_known(self.endpoint)

    def _register(self, segments: Sequence[Segment], backend: str) -> None:
        for kind, rows in by_type(segments):
            regions = [(*row, "") for row in rows]
            self._registered.append(self.nixl.register_memory(regions, kind, [backend]))

    def register_arena(self, buffer: Buffer) -> None:
        """Registers the arena for this agent's own use, without offering it to peers. Raises DataPathFailed."""
        with self.lock, _raising(DataPathFailed, "NIXL cannot register the staging buffer"):
            if self._arena is None and not self.closed:
                self._register([buffer.arena], self.endpoint.backend)
                self._arena = buffer.keeps

    def add_peer(self, peer: NixlEndpoint) -> ucx_log.LaneSets:
        """Adds a peer. Returns the sets of lanes of which one leads to the peer; none if unknown."""
        with self.lock:
            metadata = self._check_peer(peer)
            before = len(self.lanes())
            try:
                with _raising(DataPathUnavailable, f"NIXL cannot reach agent {peer.agent!r}"):
                    if self.nixl.add_remote_agent(metadata) not in (peer.agent, peer.agent.encode()):
                        raise DataPathUnavailable("the peer's metadata is of another agent")
                    for kind, rows in by_type(peer.segments):
                        if not self.nixl.check_remote_metadata(peer.agent, self.nixl.get_xfer_descs(rows, kind)):
                            raise DataPathUnavailable("the peer's metadata does not cover its memory")
                lanes = self.lanes()[before:] or self.lanes()
                if ucx_log.moved_by_peer(lanes) and "tcp" not in os.environ.get("UCX_TLS", "").split(","):
                    raise DataPathUnavailable(_TCP_UNASKED.format(peer.agent))
            except DataPathUnavailable:
                self._forget(peer.agent)
                raise
            self._peers.add(peer.agent)
            return lanes

    def _check_peer(self, peer: NixlEndpoint) -> bytes:
        """Checks a peer. Returns its metadata as NIXL wrote it."""
        if self.closed:
            raise DataPathUnavailable("the data path is closed")
        if peer.agent in self._peers or peer.agent == self.endpoint.agent:
            raise DataPathUnavailable(f"agent {peer.agent!r} is connected already")
        if peer.backend != self.endpoint.backend:
            raise DataPathUnavailable(f"the peer uses {peer.backend!r}, this rank {self.endpoint.backend!r}")
        try:
            nixl_metadata.check_segments(peer.segments)
            if self._form_is_known:
                nixl_metadata.check(peer, self.endpoint)
            return nixl_metadata.unseal(peer.metadata)
        except ValueError as error:
            raise DataPathUnavailable(f"the metadata of agent {peer.agent!r} is not usable: {error}") from None

    def remove_peer(self, peer: str) -> None:
        with self.lock:
            if any(transfer.peer == peer for transfer in self.transfers):
                raise DataPathFailed(f"a transfer with agent {peer!r} has not ended")
            if peer in self._peers:
                self._forget(peer)

    def _forget(self, peer: str) -> None:
        self._peers.discard(peer)
        with contextlib.suppress(Exception):  # NIXL itself has forgotten the peer after some errors
            self.nixl.remove_remote_agent(peer)

    def prepare(self, peer: str, piece: NixlSlice, operation: Operation) -> NixlTransfer:
        with _raising(DataPathFailed, "NIXL refused the transfer"):
            # The lists are made for each transfer: out of prepared lists NIXL took 3 times as long to make one.
            own = self.nixl.get_xfer_descs(piece.own, piece.own_type)
            there = self.nixl.get_xfer_descs(piece.peer, piece.peer_type)
            transfer = NixlTransfer(self, peer, self.nixl.initialize_xfer(operation.name, own, there, peer))
        self.transfers.add(transfer)
        return transfer

    def after_an_error(self, operation: Operation) -> PostingState:
        """Returns the state of a posting after an error: see NixlPosting."""
        if not is_host(self.endpoint.segments) or not ucx_log.moved_by_caller(self._lanes_or_asked()):
            return PostingState.PENDING
        return self.after_close(operation)

    def after_close(self, operation: Operation) -> PostingState:
        """Returns the state of a posting after the agent's end: see NixlPosting."""
        if operation is Operation.READ:
            return PostingState.FAILED
        return PostingState.FAILED if self.written_by_callers else PostingState.UNPROVED

    def late_writes(self) -> str:
        """Returns why a peer's write may still land after the end, or an empty text: see NixlPath."""
        lanes = self.lanes()
        if not lanes and _UCX_LOG.is_read:
            return ""  # no peer ever reached this agent
        lanes = self._lanes_or_asked()
        if is_host(self.endpoint.segments) and ucx_log.received_by_callee(lanes):
            return ""
        named = ", ".join(sorted({lane for some in lanes for lane in some if lane})) or "a transport that UCX chose"
        return f"nothing proves that no write of a peer's over {named} lands after the agent's end"

    @property
    def written_by_callers(self) -> bool:
        """True if every write of a peer is done by the peer's own process, straight into this memory."""
        return is_host(self.endpoint.segments) and ucx_log.written_by_caller(self._lanes_or_asked())

    def _lanes_or_asked(self) -> ucx_log.LaneSets:
        """Returns the lanes or, if UCX's log belongs to another program, what the environment asks for."""
        return self.lanes() or [tuple(os.environ.get("UCX_TLS", "").split(","))]

    def lanes(self) -> ucx_log.LaneSets:
        return _UCX_LOG.lanes(self.endpoint.agent) if self.endpoint.backend == "UCX" else []

    def progress(self) -> None:
        with self.lock:
            if not self.closed:
                # This is the one call that gives the library a turn without a transfer. No peer sends notifications.
                self.nixl.get_new_notifs([self.endpoint.backend])

    def close(self) -> None:
        """Ends the agent. Raises DataPathFailed if another thread's call into NIXL does not return."""
        if os.getpid() != self._pid:
            # A forked child that exits has its parent's sockets: nothing may end or be collected.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        if not self.lock.acquire(timeout=_CLOSE_S):
            raise DataPathFailed(f"a call into NIXL has not returned for {_CLOSE_S} s")
        try:
            if not self.closed:
                self.closed = True
                self._end()
        finally:
            self.lock.release()

    def _end(self) -> None:
        for transfer in self.transfers:
            transfer.drop()
        self.transfers.clear()
        for peer in list(self._peers):
            self._forget(peer)
        for registered in self._registered:
            with contextlib.suppress(Exception):
                self.nixl.deregister_memory(registered)
        self._registered.clear()
        # The agent proper ends with its last reference, and a traceback may hold the wrapper.
        self.nixl.agent = None


@contextlib.contextmanager
def _raising(error_type: type[DataPathFailed | DataPathUnavailable], what: str) -> Iterator[None]:
    """Raises NIXL's errors as `error_type`."""
    try:
        yield
    except KVGrpcError:
        raise
    except Exception as error:  # noqa: BLE001 - NIXL's errors have no other base
        raise error_type(f"{what}: {_sentence(error)}") from None


def _sentence(error: Exception) -> str:
    name = type(error).__name__
    return "; UCX: ".join([_MEANS.get(name, str(error) or name), *_UCX_LOG.complaints()])


def _make_agent(name: str, backend: str) -> Any:
    api = load.nixl()
    with _raising(DataPathUnavailable, f"NIXL cannot start {backend!r}"), _UCX_LOG.captured():
        nixl = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        plugins = nixl.get_plugin_list()
        if backend not in plugins:
            raise DataPathUnavailable(f"NIXL has no backend {backend!r} here, only {', '.join(plugins)}")
        nixl.create_backend(backend, {})
    return nixl
