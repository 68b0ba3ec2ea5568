"""Views of a scenario, in words: a lead's tables, and the contents of blocks."""

import re
from collections.abc import Callable

import numpy as np

from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.pins import Pin, PinKind
from kvgrpc.core.tables.transfers import Transfer
from sim.script.line import CommandLine, NamedThings
from sim.script.stage import ScriptStage
from sim.script.workshop import runs
from sim.world.memory import Cell, Prompt

Show = Callable[[ScriptStage, str, CommandLine], list[str]]


def transfers(stage: ScriptStage, name: str, _: CommandLine) -> list[str]:
    """Returns all transfers, oldest first; those of one moment are sorted by request."""
    known = sorted(stage.hosts[name].node.state.transfers, key=lambda one: (one.created, one.request_id))
    return [f"{name} {_transfer(transfer)}" for transfer in known]


def leases(stage: ScriptStage, name: str, _: CommandLine) -> list[str]:
    """Returns the live leases, oldest first."""
    state = stage.hosts[name].node.state
    return [f"{name} {_lease(lease, state.now)}" for lease in state.send.leases]


def pins(stage: ScriptStage, name: str, _: CommandLine) -> list[str]:
    """Returns the pins, oldest first; for a quarantine also the proof that would end it."""
    return [f"{name} {_pin(stage, name, pin)}" for pin in stage.hosts[name].node.state.pool.pins]


def peers(stage: ScriptStage, name: str, _: CommandLine) -> list[str]:
    """Returns the lives of other engines."""
    state = stage.hosts[name].node.state
    return [f"{name} knows {stage.called(key)}: {peer.state.value}" for key, peer in state.peers.lives.items()]


def mapped(stage: ScriptStage, name: str, _: CommandLine) -> list[str]:
    """Returns the lives whose memory is mapped."""
    return [f"{name} maps {stage.called(life)}" for life in stage.hosts[name].mover.reaches]


def tables(stage: ScriptStage, name: str, _: CommandLine) -> list[str]:
    """Returns the sizes of the tables that peers and clients could fill."""
    state = stage.hosts[name].node.state
    counts = {
        "leases": len(state.send.leases),
        "transfers": state.transfers.live,
        "accesses": len(state.access.rows),
        "cancelled keys": len(state.tombstones.keys),
        "refused leases": len(state.tombstones.leases),
        "pins": len(state.pool.pins),
    }
    return [f"{name} has " + ", ".join(f"{what} {count}" for what, count in counts.items())]


def bytes_(stage: ScriptStage, name: str, line: CommandLine) -> list[str]:
    """Returns what the blocks of a request hold, also if they now belong to another request."""
    request = line.word()
    job = stage.engines[name].jobs[request]
    host = stage.hosts[name]
    groups = host.description.pool.groups
    assert job.blocks is not None
    rows: list[tuple[int, list[int], str]] = []
    for group, ids in enumerate(job.blocks):
        for i, block in enumerate(ids.tolist(), 1):
            end = min(i * groups[group].block_tokens, job.use_tokens or len(job.prompt.tokens))
            found = _held(stage, name, group, block, Prompt(job.prompt.tokens[:end], job.prompt.salt))
            if not rows or (rows[-1][0], rows[-1][2]) != (group, found):
                rows.append((group, [], found))
            rows[-1][1].append(block)
    which = [f"{groups[group].name} " if len(groups) > 1 else "" for group, _, _ in rows]
    return [
        f"{name} {request}: {group}block{'s'[: len(ids) - 1]} {runs(np.array(ids))} hold{'s'[len(ids) - 1 :]} {found}"
        for group, (_, ids, found) in zip(which, rows, strict=True)
    ]


SHOWS: NamedThings[Show] = NamedThings(
    transfers=transfers, leases=leases, pins=pins, peers=peers, mapped=mapped, tables=tables, bytes=bytes_
)


def _held(stage: ScriptStage, name: str, group: int, block: int, wanted: Prompt) -> str:
    host = stage.hosts[name]
    found = []
    for number, region in enumerate(host.description.pool.regions):
        if region.group != group:
            continue
        for rank, memory in enumerate(host.memories):
            what = stage.holds(memory, region.offset + block * region.stride_bytes, Cell(wanted, number, rank))
            if what not in found:
                found.append(what)
    return " and ".join(found)


def _transfer(transfer: Transfer) -> str:
    row = f"{transfer.request_id} {transfer.direction.value}: {transfer.state.name}, memory {transfer.memory.name}"
    if transfer.waiting_for:
        row += f", waits for {transfer.waiting_for}"
    failure = transfer.failure
    if failure is not None:
        side = f" at the {failure.side.value}" if failure.side else ""
        then = f", next {failure.next.name}" if failure.next else ""
        row += f", {failure.reason.value} in {failure.phase or 'no phase'}{side}{then}"
    return row


def _lease(lease: Lease, now: float) -> str:
    row = f"{lease.request_id}: {lease.deadline - now:.1f}s left, {lease.done} of {lease.consumers} consumers done"
    if lease.accesses:
        row += f", read by {', '.join(sorted(lease.readers))}"
    return row


def _pin(stage: ScriptStage, name: str, pin: Pin) -> str:
    host = stage.hosts[name]
    state = host.node.state
    request = ""
    lease = state.send.leases.find(pin.owner)
    transfer = state.transfers.find(pin.owner.partition("#")[0])
    access = next((access for access in state.access.rows.values() if access.owner == pin.owner), None)
    if access is not None:
        lease = state.send.leases.find(access.lease_id)
        request = f"{lease.request_id if lease else ''} of {access.consumer}"
    elif lease is not None:
        request = lease.request_id
    elif transfer is not None:
        request = transfer.request_id
    row = f"{stage.engines[name].shop.show(pin.blocks)}: {pin.kind.value} {request}"
    if pin.kind is PinKind.QUARANTINE:
        proof = host.node.missing_proof(pin.owner)
        row += f"; to be proved: {_proof(stage, proof)}"
    return row


def _proof(stage: ScriptStage, proof: str) -> str:
    """Returns the proof without ids of accesses and lives, which no scenario can know."""
    for life in re.findall(r"[\w.:-]+@[0-9a-f]{16}", proof):
        proof = proof.replace(life, stage.called(life))
    return re.sub(r" under access [0-9a-f]+", "", proof)
