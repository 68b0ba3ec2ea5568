"""Reactions: functions through which one room's decision reaches other rooms at once. `node` fills the table.

A room that calls `state.react.peer_dead(peer)` knows none of the rooms that react. It goes on when all have reacted.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, ParamSpec

from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.transfers import Failure
from kvgrpc.errors import KVGrpcError

P = ParamSpec("P")


class Reaction(Generic[P]):
    """Functions that are called in this order."""

    def __init__(self, *functions: Callable[P, None]) -> None:
        self._functions = functions

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in self._functions:
            function(*args, **kwargs)


class Reactions(NamedTuple):
    """Events in one room that concern others."""

    peer_heard: Reaction[[Peer]]
    peer_back: Reaction[[Peer]]
    """A life that was unknown or dead was admitted."""
    peer_dead: Reaction[[Peer]]
    peer_forgotten: Reaction[[str]]
    """The row of a dead life is dropped. The argument is its key."""
    peer_ready: Reaction[[str, Peer]]
    """The lead at an address can be used."""
    peer_failed: Reaction[[str, KVGrpcError, str | None, Peer | None]]
    """The lead at an address cannot be used. Arguments: the address, the error, the engine id expected there if only
    moves that expect it fail, and the life that answered, if any.
    """
    memory_changed: Reaction[[Peer]]
    """A peer registered its memory again."""
    rekey_begins: Reaction[[]]
    """This engine's memory is about to be registered again."""
    rekey_ends: Reaction[[]]
    lease_began: Reaction[[Lease]]
    """A lease began on which readers open accesses."""
    lease_refused: Reaction[[str]]
    """The hand-over of an announced lease was refused. The argument is the lease id."""
    lease_copied: Reaction[[Lease]]
    """The lease's blocks are in the mirrors, or never will be."""
    lease_ended: Reaction[[Lease, Failure | None]]
    """A lease ended whose blocks are still listed. The second argument is the failure of its transfer, if it failed."""
    lease_voided: Reaction[[str]]
    """The engine took back blocks of a push. The argument is the id of their lease, which may have ended before."""
