"""Checks what a lead must not keep once nothing is left to do: every table of things in flight is then empty.

History, dead lives of peers, and closes for lives that may come back are kept on purpose, and not listed.
"""

from operator import attrgetter

from kvgrpc.core.node import Node
from sim.rules import Rule, broken

TABLES = {
    "pool.pins": "blocks are still pinned",
    "send.leases": "leases are still live",
    "access.rows": "accesses are still known",
    "keys": "idempotency keys are still kept",
    "tombstones.keys": "tombstones of keys are still kept",
    "tombstones.grants": "tombstones of grants are still kept",
    "timers": "something is still due",
    "peers.dials": "peers are still dialled",
    "peers.handshakes": "handshakes are still under way",
    "receive.transfers": "pulls or reservations are still known",
    "receive.targets": "targets of pushes are still known",
    "receive.open_writes": "writers are still known",
    "moves.closes.sent": "closes are not answered",
    "moves.closes.following": "closes wait for others",
    "moves.closes.unsent": "closes wait for a connection",
    "access.openings.early": "accesses are still remembered for leases to come",
    "access.openings.rows": "openings still wait",
    "access.openings.missing": "openings are still listed by what they miss",
    "access.checksum_asks.waiting": "calls still wait for checksums",
    "peers.meetings": "ranks still wait to meet a peer that has only introduced itself",
    "access.sends": "calls still wait for a rank to begin to send",
    "send.mirrors.stepping": "hand-overs still wait for the step after which they are copied",
    "send.mirrors.queue": "hand-overs are still to be copied",
    "send.prefetch.waiting": "calls still wait for checksums of a lease",
    "send.prefetch.queue": "leases still wait for checksums",
    "pool.proofs.processes_ended": "ends of processes are still kept",
    "pool.proofs.calls": "calls still wait for a re-key",
}
"""Tables of a node's state, with the meaning of rows that are left."""
_FIND = {what: attrgetter(path) for path, what in TABLES.items()}


def leftovers(node: Node) -> dict[str, int]:
    """Returns what is left, with its count."""
    state = node.state
    counts = {what: len(find(state)) for what, find in _FIND.items()}
    counts |= {f"moves are still listed {index}": count for index, count in state.moves.left().items()}
    counts |= {f"pushes are still listed {index}": count for index, count in state.send.pushes.left().items()}
    counts |= {f"turns are still {what}": count for what, count in state.moves.turns.left().items()}
    counts["transfers are not acknowledged"] = state.transfers.live
    counts["bytes of turns are not given back"] = state.moves.turns.nbytes
    return {what: count for what, count in counts.items() if count}


def check_left(node: Node, address: str) -> None:
    """Checks that nothing is left at an address."""
    for what, count in leftovers(node).items():
        broken(Rule.END, f"{address}: {what}: {count}")
