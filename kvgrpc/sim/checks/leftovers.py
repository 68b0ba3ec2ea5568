"""What a lead must not keep once nothing is left to do: every table of what is under way is empty then.

What is kept on purpose is not listed: history, dead lives of peers, and closings for those that may come back.
"""

from operator import attrgetter

from kvgrpc.core.node import Node
from kvgrpc.sim.checks.rules import Rule, broken

MOVES = ("_by_name", "_by_access", "_by_posting", "_by_address", "_by_peer", "_unmapped", "_stepping")
TABLES = {
    "state.pins": "blocks are still pinned",
    "state.leases": "leases are still live",
    "state.accesses": "accesses are still known",
    "state.keys": "idempotency keys are still kept",
    "state.cancelled_keys": "tombstones of keys are still kept",
    "state.timers": "something is still due",
    "state.turns._in_flight": "bytes are still counted as in flight",
    "state.turns._waiting": "moves still wait for their turn",
    "_peering._dialling": "peers are still dialled",
    "_peering._shakes": "handshakes are still under way",
    "_serving._early": "accesses are still remembered for leases to come",
    "_serving._openings._rows": "openings still wait",
    "_serving._openings._missing": "openings are still listed by what they miss",
    "_serving.sums._waiting": "calls still wait for checksums",
    "sums_ahead.waiting": "calls still wait for checksums of a lease",
    "sums_ahead._queue": "leases still wait to be summed up",
    "_pulls._closings._sent": "closings are not answered",
    "_pulls._closings._following": "closings wait for others",
    "_pulls._closings._unsent": "closings wait for a connection",
    "_pulls.deliveries._targets": "targets of pushes are still known",
    "_pulls.deliveries.writers._landings": "writers are still known",
    "_pushes._table._pushes": "pushes are still known",
    "_pushes._table._by_key": "pushes are still listed by key",
    "_pushes._table._by_reader": "registrations are still listed by access",
    "_proofs._ended": "ends of processes are still kept",
    "_proofs._calls": "calls still wait for a re-key",
    **{f"_pulls._table.{table}": f"pulls are still listed {table}" for table in MOVES},
    **{f"_pushes._table.{table}": f"registrations are still listed {table}" for table in MOVES},
}
"""The tables of a node, and what it means when something is in one."""
_FIND = {what: attrgetter(path) for path, what in TABLES.items()}


def leftovers(node: Node) -> dict[str, int]:
    """What is left, and how much of it."""
    counts = {what: len(find(node)) for what, find in _FIND.items()}
    counts["transfers are not acknowledged"] = node.state.transfers.live
    counts["bytes of turns are not given back"] = node.state.turns.nbytes
    return {what: count for what, count in counts.items() if count}


def check_left(node: Node, address: str) -> None:
    """Nothing is left at an address."""
    for what, count in leftovers(node).items():
        broken(Rule.END, f"{address}: {what}: {count}")
