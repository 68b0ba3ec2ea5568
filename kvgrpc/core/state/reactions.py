"""Reactions: functions through which one room's decision reaches other rooms at once. `node` fills the table.

A room that calls `state.react.peer_dead(peer)` knows none of the rooms that react. It goes on when all have reacted.
"""

from collections.abc import Callable
from typing import NamedTuple, ParamSpec

from kvgrpc.core.state.push import SourcePush
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.transfers import Failure
from kvgrpc.errors import KVGrpcError

P = ParamSpec("P")


def reaction(*functions: Callable[P, None]) -> Callable[P, None]:
    """Returns a function that calls these in this order. One alone is called without a detour."""
    if len(functions) == 1:
        return functions[0]

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        for function in functions:
            function(*args, **kwargs)

    return call


class Reactions(NamedTuple):
    """Events in one room that concern others."""

    peer_heard: Callable[[Peer], None]
    peer_back: Callable[[Peer], None]
    """A life that was unknown or dead was admitted."""
    peer_dead: Callable[[Peer], None]
    peer_forgotten: Callable[[str], None]
    """The row of a dead life is dropped. The argument is its key."""
    peer_ready: Callable[[str, Peer], None]
    """The lead at an address can be used."""
    peer_failed: Callable[[str, KVGrpcError, str | None, Peer | None], None]
    """The lead at an address cannot be used. Arguments: the address, the error, the engine id expected there if only
    moves that expect it fail, and the life that answered, if any.
    """
    peer_again: Callable[[Peer], None]
    """A living life shook hands again."""
    memory_changed: Callable[[Peer], None]
    """A peer registered its memory again."""
    rekey_begins: Callable[[], None]
    """This engine's memory is about to be registered again."""
    rekey_ends: Callable[[], None]
    lease_began: Callable[[Lease], None]
    """A lease began on which readers open accesses."""
    lease_refused: Callable[[str], None]
    """The hand-over of an announced lease was refused. The argument is the lease id."""
    lease_copied: Callable[[Lease], None]
    """The lease's blocks are in the mirrors."""
    lease_ended: Callable[[Lease], None]
    """A lease ended whose blocks are still listed. Only a life that compares checksums hears of it."""
    lease_missed: Callable[[Lease], None]
    """A lease ended on which openings wait."""
    push_ended: Callable[[SourcePush, Failure | None], None]
    """The lease of a push's parts ended. The second argument is the failure of its transfer, if it failed."""
    lease_voided: Callable[[str], None]
    """The engine took back blocks of a push. The argument is the id of their lease, which may have ended before."""
