"""What one room decides and others must act on at once, as functions that `node` fills with its table of reactions.

A room that says `state.react.peer_dead(peer)` knows none of the rooms that act on it, and goes on when all have.
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
    """What happens in one room and concerns others."""

    peer_heard: Reaction[[Peer]]
    peer_back: Reaction[[Peer]]
    """A life was admitted that was unknown or dead."""
    peer_dead: Reaction[[Peer]]
    peer_forgotten: Reaction[[str]]
    """The row of a dead life is dropped; by its key."""
    peer_ready: Reaction[[str, Peer]]
    """The lead at an address can be used."""
    peer_failed: Reaction[[str, KVGrpcError, str | None, Peer | None]]
    """The lead at an address cannot be used: why; the engine id that was expected there, where only moves that expect
    it fail; and the life that answered, if one did.
    """
    memory_changed: Reaction[[Peer]]
    """A peer registered its memory again."""
    rekey_begins: Reaction[[]]
    """This engine's memory is about to be registered again."""
    rekey_ends: Reaction[[]]
    lease_began: Reaction[[Lease]]
    """A lease stands on which readers open accesses."""
    lease_refused: Reaction[[str]]
    """The hand-over of an announced lease was refused; by its id."""
    lease_copied: Reaction[[Lease]]
    """Its blocks are in the mirrors, or will never be."""
    lease_ended: Reaction[[Lease, Failure | None]]
    """A lease has ended whose blocks are still listed; the failure of its transfer, if it failed."""
    lease_voided: Reaction[[str]]
    """The engine took back blocks of a push, by the id of their lease, which may have ended before."""
