"""Planted bugs: each is put into the core by itself, and the simulator must find it within a stated number of seeds.

    python -m tests.sim.mutants             # the table; `make sim-mutants`
    python -m tests.sim.mutants NAME        # one of them, with the trace that shows it

Each bug overrides one function. The worlds are those of `python -m sim`. The command fails if a bug is not found within
its stated number of seeds: the simulator has then become blind to it.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvgrpc.core import idempotency, node, state
from kvgrpc.core.access import cancels, checksums, openings, post_sends, served_accesses
from kvgrpc.core.idempotency import Begun
from kvgrpc.core.moves import course, moves, send_asks
from kvgrpc.core.moves.pending_closes import PendingCloses
from kvgrpc.core.peers import liveness
from kvgrpc.core.pool import allocations, quarantine
from kvgrpc.core.receive import pull_course, pulls, reservations
from kvgrpc.core.receive.reservations import Reservations
from kvgrpc.core.send import (
    checksum_prefetch,
    firmness,
    hand_overs,
    lease_renewals,
    leases as send_leases,
    push_course,
    push_ends,
    pushes,
    reclaims,
    weak_claims,
)
from kvgrpc.core.send.mirror_copies import MirrorCopies
from kvgrpc.core.state import life, move_table, node_state
from kvgrpc.core.state.checksum_comparison import ChecksumComparison
from kvgrpc.core.state.push import SourcePush
from kvgrpc.core.state.reservation import ReservationMove
from kvgrpc.core.tables import allocator, leases, offer_index, pins, remembered, timers, transfer_table
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values import block_ids, bridge, content
from sim import Rule, Setup, Violation, drawn, run
from sim.world.trace import Trace
from tests.sim import bridged, bugs, mirror_bugs, owner_bugs, send_bugs, trusting

STEPS = 3_000
"""Number of events in each world."""
SEEDS = 30


@dataclass(frozen=True)
class Mutant:
    """One planted bug: it replaces `place.name` by `make(original)`."""

    what: str
    place: Any
    name: str
    make: Callable[[Any], Any]
    rule: Rule
    """Rule that the bug breaks."""
    seeds: int = SEEDS
    """Number of seeds, counted from 0, within which the bug must be found."""
    liars: bool = False
    """True for worlds with a liar."""
    unlike: bool = False
    """True for worlds whose engines have different numbers of ranks."""

    mirrors: bool = False
    """True for worlds in which engines have mirrors."""
    collective: bool = False
    """True for worlds in which ranks of sources have to send."""
    strangers: bool = False
    """True for worlds with a stranger."""
    rings: bool = False
    """True for worlds in which engines wait for each other."""

    def world(self, seed: int) -> Setup:
        """Returns the world of a seed in which the bug is looked for."""
        return drawn(
            seed, STEPS, liars=self.liars, unlike=self.unlike, mirrors=self.mirrors, collective=self.collective,
            strangers=self.strangers, rings=self.rings,
        )  # fmt: skip


MUTANTS = (
    Mutant("settle is skipped", pull_course.PullCourse, "settle", bugs.settled_at_once, Rule.R2),
    Mutant("bytes move before the access is open", moves.Moves, "access_answered", bugs.from_memory, Rule.R2),
    Mutant("a write does not wait for a step", Reservations, "misses_step", bugs.always(False), Rule.R2, 60),
    Mutant("steps of the engine are not waited for", life.RankSteps, "done", bugs.always(1 << 60), Rule.R2),
    Mutant(
        "a step that is done in a layer is done", node.Node, "_step_done",
        lambda done: lambda self, event: done(self, replace(event, layers=None)), Rule.R2,
    ),
    Mutant("a lease that ended is found", offer_index.OfferIndex, "remove", bugs.always(None), Rule.R1),
    Mutant("a settle timeout is success", moves.Moves, "due", bugs.silence_is_valid, Rule.R2),
    Mutant("consumers are counted by message", served_accesses.ServedAccesses, "_count", bugs.by_access, Rule.R4),
    Mutant("a consumer that failed is done", served_accesses.ServedAccesses, "_count", bugs.failures_done, Rule.R4),
    Mutant("a destination that gives up under KEEP is done", served_accesses.ServedAccesses, "_count", bugs.drops_done,
        Rule.R4),
    Mutant("blocks are freed at expiry during a read", pull_course.PullEnds, "end", bugs.free_when_over, Rule.R1),
    Mutant(
        "blocks are freed at expiry during a write", ReservationMove, "busy",
        lambda _: property(lambda self: bool(self.postings)), Rule.R1,
    ),
    Mutant(
        "a source frees blocks under its own write", SourcePush, "reads", bugs.always(False), Rule.R1, 60
    ),
    Mutant("a source forgets its own write", push_ends.PushEnds, "end_rest", bugs.forgotten_source, Rule.R1, 60),
    Mutant("another incarnation vouches", served_accesses.ServedAccesses, "settle", bugs.any_life, Rule.R2),
    Mutant("a source vouches after its lease ended", served_accesses, "_verdict", bugs.always(Verdict(True)), Rule.R2),
    Mutant("a grant of another life is good", openings, "verify", bugs.any_grant, Rule.R2),
    Mutant("late news change why a transfer failed", state.NodeState, "change", bugs.overwritten, Rule.R3),
    Mutant("a transfer ends twice", transfer_table.TransferTable, "change", bugs.ended_again, Rule.R3),
    Mutant("an unknown access stops a lead", PendingCloses, "answered", bugs.known_only, Rule.R6),
    Mutant(
        "what was asked before is done again", idempotency.IdempotencyKeys, "begin", bugs.always(Begun.NEW), Rule.R10
    ),
    Mutant("leases never expire", send_leases.Leases, "due", bugs.always(None), Rule.R8),
    Mutant("an expired lease is revived", lease_renewals.LeaseRenewals, "_renew_one", bugs.revived, Rule.R8),
    Mutant("a renewal comes before what was due", node.Node, "handle", bugs.renewals_first, Rule.R8, 400),
    Mutant("a renewal shortens", leases.Lease, "renew", bugs.shortening, Rule.R8),
    Mutant("a cancel is lost", remembered.Tombstones, "end_key", bugs.always(None), Rule.R5),
    Mutant("a cancel in flight is lost", pulls.Pulls, "cancel", bugs.always(None), Rule.R5),
    Mutant("a retry under a key that was cancelled is refused", cancels.Cancels, "_cancel", bugs.cancelled_for_good,
        Rule.R5),
    Mutant("a cancel does not reach the readers", PendingCloses, "cancel_reader", bugs.always(None), Rule.R5),
    Mutant("a cancel reaches the other side as a failure", PendingCloses, "close", bugs.cancels_are_failures, Rule.R5),
    Mutant("a reader goes on though its source was cancelled", pulls.Pulls, "cancelled", bugs.deaf_reader, Rule.R5),
    Mutant("one consumer that is cancelled ends all", served_accesses.ServedAccesses, "_count", bugs.cancelled_for_all,
        Rule.R4, 200),
    Mutant("a failure is not told", state.NodeState, "tell", bugs.untold, Rule.R5),
    Mutant("accesses are not closed", PendingCloses, "close", bugs.always(None), Rule.R5),
    Mutant("a source that gives up tells no destination", push_ends.PushEnds, "_over", bugs.silent_end, Rule.R5),
    Mutant(
        "a peer that was declared dead is told nothing",
        Reservations, "closed", bugs.dead_for_good, Rule.R5, 120
    ),
    Mutant(
        "a peer that comes back after its death is told nothing",
        PendingCloses, "peer_back", bugs.always(None), Rule.R5
    ),
    Mutant("that a write is at rest is not told", push_ends.PushEnds, "at_rest", bugs.rest_untold, Rule.R5),
    Mutant(
        "a silent peer is waited for without an end",
        liveness.PeerLiveness, "_begin_grace", bugs.always(None), Rule.R5
    ),
    Mutant("a queue is waited for without an end", timers.Timers, "set", bugs.never(Timer.QUEUE), Rule.R7),
    Mutant("bytes are waited for without an end", timers.Timers, "set", bugs.never(Timer.TRANSFER), Rule.R7),
    Mutant("a verdict is waited for without an end", timers.Timers, "set", bugs.never(Timer.SETTLE), Rule.R7),
    Mutant("the other side of a push is waited for without an end", timers.Timers, "set",
        bugs.never(Timer.REGISTRATION, Timer.RENDEZVOUS), Rule.R7),
    Mutant("checksums are waited for without an end", timers.Timers, "set", bugs.never(Timer.CHECKSUMS), Rule.R7, 400),
    Mutant("a handshake is waited for without an end", timers.Timers, "set", bugs.never(Timer.CONNECT), Rule.R7, 60),
    Mutant("too much in quarantine changes nothing", timers.Timers, "set", bugs.never(Timer.QUARANTINE), Rule.R7),
    Mutant("a re-key waits for what does not end", timers.Timers, "set", bugs.never(Timer.REKEY), Rule.R7),
    Mutant("content is not compared", openings, "check", owner_bugs.claimed, Rule.R11),
    Mutant("pins are counted per group although groups share blocks", pins.PinTable, "__init__",
        lambda made: lambda self, blocks, _: made(self, blocks), Rule.R1),
    Mutant("a released handle is trusted", moves.Moves, "posting_ended", bugs.at_rest, Rule.R1),
    Mutant(
        "a close that proves nothing is trusted", Reservations, "closed",
        lambda closed: lambda self, access, **fields: closed(self, access, **(fields | {"quiesced": True})), Rule.R1,
    ),
    Mutant("a claimed lease is reclaimed", firmness.Firmness, "claimed", bugs.always(None), Rule.R2),
    Mutant(
        "a firm lease is reclaimed", firmness.Firmness, "_keep",
        lambda keep: lambda self, lease, _: keep(self, lease, 0.0), Rule.R8,
    ),
    Mutant(
        "a lease is reclaimed under our own write", firmness.Firmness, "is_claimed", bugs.postings_unheeded, Rule.R1, 60
    ),
    Mutant("readers that wait yield to nobody", weak_claims.WeakClaims, "younger", bugs.always([]), Rule.R13,
        rings=True),
    Mutant(
        "readers that wait yield to younger requests", weak_claims.WeakClaims, "younger", bugs.anyone, Rule.R2,
        rings=True
    ),
    Mutant("readers that read yield", weak_claims.WeakClaims, "reading", bugs.always(None), Rule.R2, rings=True),
    Mutant("a reclaimed lease vouches", reclaims.Reclaims, "carry_out", bugs.reclaimed_and_live, Rule.R5),
    Mutant("two postings write into one block", pull_course.PullCourse, "_post_slice", bugs.posted_twice, Rule.R1),
    Mutant("a source posts twice into one block", push_course.PushCourse, "_post_slice", bugs.posted_twice, Rule.R1),
    Mutant("a dead lead is taken for a dead mover", served_accesses.ServedAccesses, "peer_dead", bugs.dead_mover,
        Rule.R1),
    Mutant(
        "a re-key is trusted where it proves nothing",
        quarantine.Quarantine, "rekeyed", bugs.proved_anyway, Rule.R1, 120
    ),
    Mutant(
        "what a dead process sent is believed to have arrived",
        quarantine.Quarantine, "process_ended", bugs.landed, Rule.R1, 60
    ),
    Mutant("the end of a process is not heard", quarantine.Quarantine, "process_ended", bugs.always(None), Rule.END),
    Mutant("ends of processes are not looked for", liveness.PeerLiveness, "watch", bugs.always(None), Rule.END, 60),
    Mutant("a proof is ignored", Reservations, "peer_at_rest", bugs.always(None), Rule.END),
    Mutant("the last posting's end is lost", pull_course.PullEnds, "at_rest", bugs.always(None), Rule.END),
    Mutant("bytes of a turn are not given back", move_table.Turns, "leave", bugs.kept_in_flight, Rule.END),
    Mutant("closes that came early are kept", served_accesses.ServedAccesses, "forget", bugs.kept_early, Rule.END),
    Mutant("checksums are not compared", ChecksumComparison, "both", bugs.all_agree, Rule.R2),
    Mutant(
        "checksums are computed before the step is over",
        checksum_prefetch.ChecksumPrefetch,
        "announced",
        bugs.summed_early,
        Rule.R2,
    ),
    Mutant("the checksums of other blocks are answered", checksum_prefetch, "_places", bugs.from_the_first, Rule.R2),
    Mutant("a write concludes when it is posted", push_course.PushCourse, "_post", bugs.concluded, Rule.R9),
    *(replace(mutant, unlike=True) for mutant in (
        Mutant("every rank reads the first heads of its source", bridge, "shares", bridged.first_heads, Rule.R2),
        Mutant("what one pair of ranks has moved all of a rank have", course, "posting_name", bridged.by_rank, Rule.R1),
        Mutant("stages exchange with those of their own number", bridge, "common_stages", bridged.own_number, Rule.R2),
        Mutant(
            "every layer is read from the first stage", bridge.Bridge, "_all_shares", bridged.first_stage, Rule.R2
        ),
    )),
    *(replace(mutant, mirrors=True) for mutant in (
        Mutant("blocks are read before they are in the mirrors", MirrorCopies, "_add", mirror_bugs.read_uncopied,
            Rule.R2),
        Mutant("blocks are copied before their step is done", MirrorCopies, "_add", mirror_bugs.copied_early, Rule.R2),
        Mutant("a copy into a mirror that failed is one", MirrorCopies, "copied", mirror_bugs.copied_anyway, Rule.R2),
        Mutant("one rank that has copied speaks for all", MirrorCopies, "copied", mirror_bugs.copied_by_one, Rule.R2),
    )),
    *(replace(mutant, collective=True) for mutant in (
        Mutant("a send concludes", node.Node, "handle", send_bugs.sent_is_there, Rule.R9),
        Mutant("a number of which nothing was heard is used again", send_asks.SendAsks, "answered",
            send_bugs.refused_for_sure, Rule.R9),
        Mutant("a send is waited for without an end", timers.Timers, "set", bugs.never(Timer.SEND), Rule.R7),
        Mutant("what was readable once is sent", post_sends.PostSends, "_check_granted", send_bugs.outdated, Rule.R2),
    )),
    *(replace(mutant, collective=True, liars=True) for mutant in (
        Mutant("a source sends what the access does not cover", post_sends, "covered", bugs.always(True), Rule.R2),
        Mutant("a peer has sent what another peer may read", post_sends.PostSends, "_check_granted",
            send_bugs.any_access, Rule.R2, 120),
    )),
    *(replace(mutant, liars=True) for mutant in (
        Mutant(
            "a peer settles an access of another peer",
            served_accesses.ServedAccesses, "_settle_row", trusting.settles_for_all, Rule.R2
        ),
        Mutant(
            "a peer closes an access of another peer",
            served_accesses.ServedAccesses, "_close_row", trusting.closes_for_all, Rule.R2
        ),
        Mutant(
            "a peer sends parts for an access of another peer",
            Reservations, "parts_ready", trusting.widens_for_all, Rule.R2
        ),
        Mutant(
            "a peer asks checksums of an access of another peer",
            checksums.ChecksumCalls, "ask", trusting.sums_for_all, Rule.R2, 60
        ),
        Mutant("an access id stands for all uses of it", openings, "_check_same", bugs.always(None), Rule.R2),
        Mutant("a stranger speaks in a peer's name", node_state.PeerTables, "caller", trusting.by_its_name, Rule.R2),
        Mutant("a stranger shakes hands in a peer's name", liveness, "introduced", trusting.introduced_by_name,
            Rule.R2),
        Mutant("a stranger keeps a peer alive", liveness.PeerLiveness, "streaming", trusting.alive_by_name, Rule.R2),
        Mutant("a life that was replaced is heard", node_state.PeerTables, "caller", trusting.dead_or_alive, Rule.R2),
        Mutant("a grant that is opened is not verified", openings, "verify", trusting.unsigned, Rule.R2),
        Mutant("a grant that is renewed is not verified", send_leases, "verify", trusting.unsigned, Rule.R2, 60),
        Mutant("a source's answer is not checked", pull_course, "wrong_opened", bugs.always(""), Rule.R2, 60),
        Mutant("a destination's answer is not checked", push_course.PushCourse, "_wrong", bugs.always(""), Rule.R2, 60),
        Mutant("a peer may list a block in two groups that share it", block_ids, "check_spaces", bugs.always(None),
            Rule.R2, 60),
        Mutant("a source's memory is what it was", pull_course.PullCourse, "opened", trusting.any_generation, Rule.R2),
        Mutant(
            "a destination's memory is what it was", push_course.PushCourse, "opened", trusting.any_generation, Rule.R2,
            120,
        ),
        Mutant("a verdict is of all accesses", moves.Moves, "settle_answered", trusting.valid_for_all, Rule.R2),
        Mutant("what is pushed is not compared", content, "check", owner_bugs.claimed, Rule.R11),
        Mutant("parts of an earlier epoch are taken", Reservations, "check", trusting.any_epoch, Rule.R2),
        Mutant("layers are there that a source names", Reservations, "_within",
            lambda _: lambda self, layers: layers, Rule.R2, 60),
        Mutant(
            "any life says that a write is at rest", served_accesses.ServedAccesses, "_take_proofs",
            trusting.any_life_at_rest, Rule.R1,
        ),
        Mutant("another life takes over a push", Reservations, "check", trusting.any_life_delivers, Rule.R2),
        Mutant(
            "checksums that did not come are equal", moves.Moves, "checksums_answered", trusting.absent_agree, Rule.R2
        ),
        Mutant("fewer checksums will do", ChecksumComparison, "both", trusting.shorter_will_do, Rule.R2, 60),
    )),
    *(replace(mutant, strangers=True) for mutant in (
        Mutant("a stranger reads", hand_overs.HandOvers, "_check", owner_bugs.handed_over_by_anybody, Rule.R12),
        Mutant("a stranger writes by a push", reservations, "check_destination", owner_bugs.filled_for_anybody,
            Rule.R12),
        Mutant("a stranger writes by a pull", pulls, "check_destination", owner_bugs.filled_for_anybody, Rule.R12),
        Mutant("a stranger frees an allocation", allocations, "may", bugs.always(True), Rule.R12),
        Mutant("a stranger frees blocks by their numbers", allocator, "may", bugs.always(True), Rule.R12),
        Mutant("a stranger takes blocks back", life, "may", bugs.always(True), Rule.R12),
        Mutant("a stranger acknowledges for an engine", transfer_table, "may", bugs.always(True), Rule.R12),
        Mutant("a stranger adds parts to a push", pushes.Pushes, "_check", owner_bugs.handed_over_by_anybody, Rule.R12),
    )),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Result of a hunt. `seeds` is the number of seeds it took, or None if the bug was not found."""

    mutant: Mutant
    seeds: int | None
    violation: Violation | None


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plants the bug for the duration of the context."""
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
    """Runs seeds until one breaks the rule of the bug. Violations of other rules do not count."""
    with planted(mutant):
        for seed in range(mutant.seeds):
            for violation in run(mutant.world(seed)).violations:
                if violation.rule is mutant.rule:
                    return Found(mutant, seed + 1, violation)
    return Found(mutant, None, None)


def hunt_named(what: str) -> Found:
    """Hunts the bug with this name. Functions cannot be pickled for another process, so only the name is passed."""
    found = hunt(named(what))
    return replace(found, mutant=replace(found.mutant, place=None, make=_none))


def _none(sound: Any) -> Any:
    return sound


def named(what: str) -> Mutant:
    """Returns the planted bug with this name."""
    return next(mutant for mutant in MUTANTS if mutant.what == what)


def table(found: list[Found]) -> str:
    """Returns the table for docs/reliability.md."""
    rows = ["| Planted bug | Seeds needed | Stated | Rule |", "|---|---|---|---|"]
    for row in found:
        seeds = row.seeds or "NOT FOUND"
        rows.append(f"| {row.mutant.what} | {seeds} | {row.mutant.seeds} | {row.mutant.rule} |")
    return "\n".join(rows)


def show(mutant: Mutant) -> None:
    """Prints the trace of the first world that finds the bug."""
    found = hunt(mutant)
    if found.seeds is None:
        sys.stdout.write(f"not found within {mutant.seeds} seeds\n")
        return
    seen = Trace()
    with planted(mutant):
        run(mutant.world(found.seeds - 1), seen)
    assert found.violation is not None
    lines = [*seen.lines(found.violation.about), f"seed {found.seeds - 1}: {found.violation.message}"]
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    """Prints the table, or one bug's trace. Returns 1 if the table has a bug that was not found."""
    if len(sys.argv) > 1:
        show(named(" ".join(sys.argv[1:])))
        return 0
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(hunt_named, [mutant.what for mutant in MUTANTS]))
    sys.stdout.write(table(found) + "\n")
    return int(any(row.seeds is None for row in found))


if __name__ == "__main__":
    sys.exit(main())
