"""Checks what a lead must not keep once nothing is left to do: every table of things in flight is then empty.

History, dead lives of peers, and closes for lives that may come back are kept on purpose, and not listed.
"""

from operator import attrgetter

from kvgrpc.core.node import Node
from sim.rules import Rule, broken

TABLES = {
    "pins": "blocks are still pinned",
    "leases": "leases are still live",
    "accesses": "accesses are still known",
    "keys": "idempotency keys are still kept",
    "tombstones": "tombstones of keys are still kept",
    "ended_grants": "tombstones of grants are still kept",
    "timers": "something is still due",
    "dials": "peers are still dialled",
    "handshakes": "handshakes are still under way",
    "receives": "pulls or reservations are still known",
    "targets": "targets of pushes are still known",
    "open_writes": "writers are still known",
    "closes.sent": "closes are not answered",
    "closes.following": "closes wait for others",
    "closes.unsent": "closes wait for a connection",
    "openings.early": "accesses are still remembered for leases to come",
    "openings.rows": "openings still wait",
    "openings.missing": "openings are still listed by what they miss",
    "checksum_asks.waiting": "calls still wait for checksums",
    "meetings": "ranks still wait to meet a peer that has only introduced itself",
    "sends": "calls still wait for a rank to begin to send",
    "mirrors.stepping": "hand-overs still wait for the step after which they are copied",
    "mirrors.queue": "hand-overs are still to be copied",
    "prefetch.waiting": "calls still wait for checksums of a lease",
    "prefetch.queue": "leases still wait for checksums",
    "proofs.processes_ended": "ends of processes are still kept",
    "proofs.calls": "calls still wait for a re-key",
}
"""Tables of a node's state, with the meaning of rows that are left."""
_FIND = {what: attrgetter(path) for path, what in TABLES.items()}


def leftovers(node: Node) -> dict[str, int]:
    """Returns what is left, with its count."""
    state = node.state
    counts = {what: len(find(state)) for what, find in _FIND.items()}
    counts |= {f"moves are still listed {index}": count for index, count in state.moves.left().items()}
    counts |= {f"pushes are still listed {index}": count for index, count in state.pushes.left().items()}
    counts |= {f"turns are still {what}": count for what, count in state.turns.left().items()}
    counts["transfers are not acknowledged"] = state.transfers.live
    counts["bytes of turns are not given back"] = state.turns.nbytes
    return {what: count for what, count in counts.items() if count}


def check_left(node: Node, address: str) -> None:
    """Checks that nothing is left at an address."""
    for what, count in leftovers(node).items():
        broken(Rule.END, f"{address}: {what}: {count}")
