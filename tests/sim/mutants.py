"""Bugs that are planted in the core, one at a time, and how many seeds the simulator takes to find each.

    python -m tests.sim.mutants             # the table; `make sim-mutants`
    python -m tests.sim.mutants NAME        # one of them, with the trace that shows it

Each is planted in one place by overriding one function; the worlds are those of `kvgrpc sim`. A mutant that is not
found within its stated number of seeds fails the command: then the simulator has become blind to something.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvgrpc.core import (
    delivering,
    handover,
    leases,
    moves,
    open_access,
    proofs,
    pull_ends,
    pull_steps,
    pulling,
    push_ends,
    push_steps,
    serving,
    state,
)
from kvgrpc.core.accesses import AccessState, Verdict
from kvgrpc.core.actions import Failed, Post, Verdicts
from kvgrpc.core.events import AccessAnswered, Opened
from kvgrpc.core.landing import Landing
from kvgrpc.core.leases import LeaseState
from kvgrpc.sim import Violation, drawn, run
from kvgrpc.sim.trace import Trace

STEPS = 3_000
"""Events in each world."""


@dataclass(frozen=True)
class Mutant:
    """One bug. `place.name` becomes `make(the sound one)`."""

    what: str
    place: Any
    name: str
    make: Callable[[Any], Any]
    seeds: int
    """Within so many seeds, counted from 0, it is found."""


def _settled_at_once(settle: Any) -> Any:
    return lambda steps, pull: (settle(steps, pull), steps.settled(pull))


def _from_memory(answered: Any) -> Any:
    """OpenAccess is asked again after a failure, but the blocks of the last answer are read meanwhile."""
    known: dict[bytes, Opened] = {}

    def access_answered(moves: Any, event: AccessAnswered) -> None:
        move = moves._table.of_access(event.access_id)
        if move is not None and isinstance(event.result, Opened):
            known[move.token] = event.result
        elif move is not None and move.token in known:
            event = replace(event, result=known[move.token])
        answered(moves, event)

    return access_answered


def _by_access(count: Any) -> Any:
    """Each access that ends counts as a consumer."""

    def _count(self: Any, access: Any, lease: Any, *, received: bool) -> None:
        name = access.consumer
        access.consumer = f"{name}#{access.id.hex()}"
        count(self, access, lease, received=received)
        access.consumer = name

    return _count


def _free_when_over(end: Any) -> Any:
    def ended(ends: Any, pull: Any, *args: Any, **fields: Any) -> None:
        pull.postings.clear()
        end(ends, pull, *args, **fields)

    return ended


def _any_life(settle: Any) -> Any:
    """An access that this life does not know was one of the last life: that must have been all right."""

    def settled(self: Any, event: Any) -> None:
        known = self._state.accesses
        if all(row.access_id in known for row in event.settlings):
            settle(self, event)
        else:
            self._state.reply(event.call.id, Verdicts(tuple(Verdict(True) for _ in event.settlings)))

    return settled


def _revived(renew_one: Any) -> Any:
    """A renewal that comes too late makes the lease, and what was read under it, good again."""

    def _renew_one(self: Any, ref: Any, ttl_s: float | None) -> Any:
        lease = self._state.leases.find(ref.lease_id) if ref.lease_id else _find(self, ref)
        if lease is None or lease.state is not LeaseState.EXPIRED:
            return renew_one(self, ref, ttl_s)
        for access in self._state.accesses.values():
            if access.lease_id == lease.id and access.state is AccessState.STALE:
                access.state, access.stale = AccessState.OPEN, None
        return lease.ttl_s, None

    return _renew_one


def _find(hand_over: Any, ref: Any) -> Any:
    try:
        return hand_over.find(ref)
    except Exception:  # noqa: BLE001 - a grant that is none
        return None


def _shortening(renew: Any) -> Any:
    def renewed(lease: Any, now: float, ttl_s: float | None) -> None:
        renew(lease, now, ttl_s)
        lease.deadline = min(now + lease.last_ttl_s, lease.cap)

    return renewed


def _at_rest(posting_ended: Any) -> Any:
    return lambda self, event: posting_ended(self, replace(event, quiesced=True))


def _posted_twice(post_slice: Any) -> Any:
    def _post_slice(steps: Any, move: Any) -> None:
        post_slice(steps, move)
        for action in [action for action in steps._state.actions if isinstance(action, Post)]:
            steps._state.emit(action)

    return _post_slice


def _dead_mover(peer_dead: Any) -> Any:
    """Its lead is dead, so it writes nothing more."""

    def dead(self: Any, peer: Any) -> None:
        written = [access_id for access_id in peer.accesses if self._deliveries.writers.find(access_id)]
        peer_dead(self, peer)
        for access_id in written:
            self._deliveries._proved(access_id)

    return dead


def _concluded(post: Any) -> Any:
    """What was sent is there."""

    def _post(steps: Any, push: Any) -> None:
        post(steps, push)
        if push.postings and push.left is None:
            push.postings.clear()
            steps.settle(push)

    return _post


def _untold(tell: Any) -> Any:
    return lambda self, owner, news: None if isinstance(news, Failed) else tell(self, owner, news)


def _all_agree(both: Any) -> Any:
    return lambda self: (both(self)[1],) * 2


def _proved_anyway(rekeyed: Any) -> Any:
    return lambda self, event: rekeyed(self, replace(event, message=""))


def _landed(process_ended: Any) -> Any:
    return lambda self, event: process_ended(self, replace(event, drained=True))


def _freed_under_write(lease_ended: Any) -> Any:
    return lambda self, lease, message: (lease_ended(self, lease, message), False)[1]


MUTANTS = (
    Mutant("settle is skipped", pull_steps.PullSteps, "settle", _settled_at_once, 30),
    Mutant("bytes move before the access is open", pulling.Pulls, "access_answered", _from_memory, 30),
    Mutant("a write does not wait for a step", delivering.Deliveries, "misses_step", lambda _: lambda *_: False, 30),
    Mutant("steps of the engine are not waited for", state.NodeState, "step_done", lambda _: lambda *_: 1 << 60, 30),
    Mutant("consumers are counted by message", serving.Serving, "_count", _by_access, 30),
    Mutant("blocks are freed at expiry during a read", pull_ends.PullEnds, "end", _free_when_over, 30),
    Mutant(
        "blocks are freed at expiry during a write", Landing, "busy",
        lambda _: property(lambda self: bool(self.postings)), 30,
    ),
    Mutant("a source frees blocks under its own write", push_ends.PushEnds, "lease_ended", _freed_under_write, 30),
    Mutant("another incarnation vouches", serving.Serving, "settle", _any_life, 30),
    Mutant("a source vouches after its lease ended", serving, "_verdict", lambda _: lambda access: Verdict(True), 30),
    Mutant("leases never expire", handover.HandOver, "due", lambda _: lambda *_: None, 30),
    Mutant("an expired lease is revived", handover.HandOver, "_renew_one", _revived, 30),
    Mutant("a cancel is lost", state.NodeState, "bury_key", lambda _: lambda *_, **__: None, 30),
    Mutant("a cancel in flight is lost", pulling.Pulls, "cancel", lambda _: lambda *_: False, 30),
    Mutant("a failure is not told", state.NodeState, "tell", _untold, 30),
    Mutant("a renewal shortens", leases.Lease, "renew", _shortening, 30),
    Mutant("content is not compared", open_access, "check", lambda _: lambda *_: None, 30),
    Mutant("a released handle is trusted", pulling.Pulls, "posting_ended", _at_rest, 30),
    Mutant(
        "a closing that proves nothing is trusted", delivering.Deliveries, "closed",
        lambda closed: lambda self, access, **fields: closed(self, access, **(fields | {"quiesced": True})), 30,
    ),
    Mutant("two postings write into one block", pull_steps.PullSteps, "_post_slice", _posted_twice, 30),
    Mutant("a source posts twice into one block", push_steps.PushSteps, "_post_slice", _posted_twice, 30),
    Mutant("a dead lead is taken for a dead mover", serving.Serving, "peer_dead", _dead_mover, 30),
    Mutant("a re-key is trusted where it proves nothing", proofs.Proofs, "rekeyed", _proved_anyway, 30),
    Mutant("what a dead process sent is taken for landed", proofs.Proofs, "process_ended", _landed, 30),
    Mutant("checksums are not compared", moves.Comparing, "both", _all_agree, 30),
    Mutant("a send concludes", push_steps.PushSteps, "_post", _concluded, 30),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """How one was found; `seeds` is how many it took, None: it was not."""

    mutant: Mutant
    seeds: int | None
    violation: Violation | None


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The bug is there meanwhile."""
    own = mutant.name in vars(mutant.place)
    sound = getattr(mutant.place, mutant.name)
    setattr(mutant.place, mutant.name, mutant.make(sound))
    try:
        yield
    finally:
        if own:
            setattr(mutant.place, mutant.name, sound)
        else:
            delattr(mutant.place, mutant.name)


def hunt(mutant: Mutant) -> Found:
    """Runs seeds until one finds it."""
    with planted(mutant):
        for seed in range(mutant.seeds):
            violations = run(drawn(seed, STEPS)).violations
            if violations:
                return Found(mutant, seed + 1, violations[0])
    return Found(mutant, None, None)


def hunt_named(what: str) -> Found:
    """The same, by name: functions do not travel to other processes."""
    found = hunt(named(what))
    return replace(found, mutant=replace(found.mutant, place=None, make=_none))


def _none(sound: Any) -> Any:
    return sound


def named(what: str) -> Mutant:
    """The mutant of that name."""
    return next(mutant for mutant in MUTANTS if mutant.what == what)


def table(found: list[Found]) -> str:
    """For docs/reliability.md."""
    rows = ["| Planted bug | Seeds needed | Stated | Rule |", "|---|---|---|---|"]
    for row in found:
        rule = row.violation.rule if row.violation else "NOT FOUND"
        rows.append(f"| {row.mutant.what} | {row.seeds or '-'} | {row.mutant.seeds} | {rule} |")
    return "\n".join(rows)


def show(mutant: Mutant) -> None:
    """How one is found, in lines."""
    found = hunt(mutant)
    if found.seeds is None:
        sys.stdout.write(f"not found within {mutant.seeds} seeds\n")
        return
    seen = Trace()
    with planted(mutant):
        run(drawn(found.seeds - 1, STEPS), seen)
    assert found.violation is not None
    lines = [*seen.lines(found.violation.about), f"seed {found.seeds - 1}: {found.violation.message}"]
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    """Prints the table; 1 when one was not found."""
    if len(sys.argv) > 1:
        show(named(" ".join(sys.argv[1:])))
        return 0
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(hunt_named, [mutant.what for mutant in MUTANTS]))
    sys.stdout.write(table(found) + "\n")
    return int(any(row.seeds is None for row in found))


if __name__ == "__main__":
    sys.exit(main())
