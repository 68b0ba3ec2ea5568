"""The lead: the objects that the RPC services share. The rules are in the node."""

from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Protocol, TypeVar

from kvgrpc.config import Config
from kvgrpc.core.actions import Answer
from kvgrpc.errors import PermissionDenied, Reason
from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.service.audit import Audit
from kvgrpc.service.call_queue import CallQueue
from kvgrpc.service.call_records import CallRecords
from kvgrpc.service.engine_watchers import EngineWatchers
from kvgrpc.service.identity.gate import EngineIds, Gate
from kvgrpc.service.open_streams import OpenStreams
from kvgrpc.service.runner import Runner
from kvgrpc.service.watchers import Watchers
from kvgrpc.v1 import common_pb2
from kvgrpc.wire.bounds import text

_Answer = TypeVar("_Answer", bound=Answer)
DIAL_ANSWERS_KEPT = 1_024
"""Maximum number of addresses whose dial check is cached: every pull asks."""


class Answerer(Protocol):
    """The part of a server that the frame of every call needs."""

    @property
    def gate(self) -> Gate: ...

    @property
    def calls(self) -> CallRecords: ...

    @property
    def call_queue(self) -> CallQueue: ...

    @property
    def ticket(self) -> bytes:
        """The ticket of the attached engine; empty while none is attached."""

    def header(self) -> common_pb2.ResponseHeader:
        """Returns the header that names who answers."""


class EntryStatus(Protocol):
    """The state of this engine's entry in a registry."""

    def entry(self) -> EngineEntry | None:
        """Returns the entry as of now; None: there is no engine, or no entry that could be published."""

    @property
    def used(self) -> bool:
        """True if there is a registry to publish in."""

    @property
    def published(self) -> bool:
        """True while the registry has this life's entry."""

    @property
    def failure(self) -> str:
        """Reason why the registry lacks the entry; empty if it has it, or if there is nothing to publish."""


class Lead:
    """One engine's lead, as its services see it. `progress_age_s` asks the movers."""

    def __init__(
        self,
        config: Config,
        runner: Runner,
        data_paths: Callable[[], list[tuple[str, bool, str]]],
        read_runs: Callable[[int, list[tuple[int, int]]], Awaitable[list[bytes]]],
        progress_age_s: Callable[[], float],
        version: str,
    ) -> None:
        self.use(config)
        self.runner = runner
        self.watchers = Watchers(runner)
        self.engine_watchers = EngineWatchers(runner)
        self.standing = OpenStreams()
        self.call_queue = CallQueue()
        self.data_paths = data_paths
        self.read_runs = read_runs
        """Reads bytes of a rank's memory, by (offset, length), for debugging."""
        self.progress_age_s = progress_age_s
        self.version = version
        self.gate = Gate(config)
        self.engine_ids = EngineIds()
        self.audit = Audit()
        self.calls = CallRecords()
        self.publication: EntryStatus | None = None
        self.ticket = b""
        """The ticket of the attached engine; empty while none is attached."""

    def use(self, config: Config) -> None:
        """Goes by these settings from now on. Only what `config_sources` reloads is read at each use, so give nothing
        else another value.
        """
        self.config = config
        self._may_dial = lru_cache(DIAL_ANSWERS_KEPT)(config.may_dial)

    @property
    def weights(self) -> str:
        """The weights revision that contents are bound to."""
        description = self.runner.node.state.life.description
        return description.weights_revision if description else ""

    @property
    def block_limit(self) -> int:
        """Maximum number of blocks in one request."""
        return self.config.limits.blocks_per_request

    @property
    def renewal_limit(self) -> int:
        """Maximum number of leases in one call."""
        return self.config.limits.renewals_per_call

    def may_dial(self, address: str) -> bool:
        """Returns whether `address` (host:port) is on the dial list as it is now."""
        return self._may_dial(address)

    def check_dial(self, address: str, field: str = "address") -> None:
        """Raises PermissionDenied for an address that this server may not dial. Call it before anything dials."""
        if not self._may_dial(text(field, address)):
            raise PermissionDenied(
                Reason.DIAL_REFUSED, f"{address!r} is not on this server's dial list (setting dial_allow)"
            )

    def check_caller(self, caller: peer_pb2.Caller) -> None:
        """Raises PreconditionFailed for an unknown peer (NO_HANDSHAKE), and for a caller that does not prove that it
        speaks for the peer (NOT_PROVED); PermissionDenied (NOT_OWNER) for an engine id of another identity. Services
        check this before they read the call.
        """
        self.runner.node.state.peers.caller(caller.engine_id, caller.incarnation, caller.proof)
        self.engine_ids.claim(caller.engine_id)

    def header(self) -> common_pb2.ResponseHeader:
        """Returns the header that names this engine and its life."""
        state = self.runner.node.state
        engine_id = state.life.description.engine_id if state.life.description else self.config.engine_id
        return common_pb2.ResponseHeader(
            engine_id=engine_id, incarnation=state.life.incarnation, event_seq=state.transfers.seq
        )
