"""A stranger: a caller without the ticket of any engine, which names things of engines by their real ids.

It calls any lead at any time, by every call that takes a name. Each call must be refused and change nothing (R12).
Calls for which an id or a key is enough are left out: renewals and releases of leases, and cancels of transfers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvgrpc.core.events import (
    AcknowledgeTransfers,
    AllocateBlocks,
    Call,
    CancelTransfer,
    Destination,
    Event,
    FinishedBlocks,
    FreeBlocks,
    GiveAllocation,
    GiveDestination,
    PullBlocks,
    ReclaimBlocks,
    ReserveBlocks,
    WaitsFor,
)
from kvgrpc.core.state import NodeState
from kvgrpc.core.values.block_ids import BlockLists, Ids
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import AccessKind, Claims, mint
from kvgrpc.core.values.owners import ANONYMOUS
from sim.checks.owners import Things, check_refused, check_same, things
from sim.hosts.host import Host
from sim.hosts.world import World
from sim.world.network import Result

CALL = Call(0, ANONYMOUS)
TOKENS = (16, 32, 48)


class Stranger:
    """The stranger of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng("stranger")
        self._deeds: tuple[Callable[[NodeState], Any], ...] = (
            self._hand_over, self._reserve, self._pull, self._give_blocks, self._add_part, self._free,
            self._free_allocation, self._allocate, self._renew, self._give_allocation, self._cancel, self._acknowledge,
            self._reclaim,
        )  # fmt: skip

    def keep_on(self, rate_per_s: float) -> None:
        """Calls at that rate until the world closes."""

        def speak() -> None:
            if not self._world.closing:
                self._speak()
                self.keep_on(rate_per_s)

        self._world.agenda.after(self._rng.expovariate(rate_per_s), speak)

    def _speak(self) -> None:
        host, deed = self._rng.choice(self._world.hosts), self._rng.choice(self._deeds)
        if host.lies or not host.ready:
            return
        said = deed(host.node.state)
        if said is not None:
            self._world.seen["trespass"] += 1
            self._say(host, said)

    def _say(self, host: Host, said: Any) -> None:
        before: list[Things] = []

        def ask(call: Call) -> Event:
            state = host.node.state
            due = state.timers.next_deadline()
            # The call is not compared if a timer is due, which acts first.
            before[:] = [things(state)] if due is None or due > host.clock() else []
            made: Event = replace(said, call=call)
            return made

        def give(result: Result) -> None:
            check_refused(said, result, host.address)
            if before:
                check_same(said, before[0], things(host.node.state), host.address)

        host.call(ask, ANONYMOUS, give)

    # -- blocks

    def _hand_over(self, state: NodeState) -> FinishedBlocks:
        """Hands over blocks for others to read, as FinishedBlocks or as GrantLease."""
        content = self._content()
        blocks, transfer = self._blocks(state, content.tokens), self._rng.random() < 0.5
        return FinishedBlocks(CALL, self._key(), blocks, content, transfer=transfer, allocation_id=self._stated(state))

    def _reserve(self, state: NodeState) -> ReserveBlocks:
        content = self._content()
        blocks = self._blocks(state, content.tokens)
        return ReserveBlocks(CALL, self._key(), blocks, content, allocation_id=self._stated(state))

    def _pull(self, state: NodeState) -> PullBlocks | None:
        """Pulls with a grant of any other lead, which any bearer may use."""
        sources = [host.node.state for host in self._world.hosts if host.ready and host.node.state is not state]
        source = self._rng.choice(sources) if sources else None
        leases = [lease for lease in source.send.leases if lease.live] if source else []
        if source is None or not leases:
            return None
        lease, me = self._rng.choice(leases), source.life.engine
        count, tokens = sum(map(len, lease.blocks)), lease.content.tokens
        claims = Claims(
            AccessKind.READ, me.engine_id, me.incarnation, me.address, lease.id, self._key(), lease.ttl_s, count, tokens
        )
        destination = Destination(self._blocks(state, tokens), allocation_id=self._stated(state))
        token = mint(claims, source.life.grant_key)
        return PullBlocks(CALL, token, lease.content, self._rng.randbytes(16), destination=destination)

    def _give_blocks(self, state: NodeState) -> GiveDestination | None:
        """Gives blocks of the engine to a pull that waits for some, or none, as if all tokens were there."""
        pulls = [pull for pull in state.receive.transfers.values() if pull.destination is None]
        if not pulls:
            return None
        pull = self._rng.choice(pulls)
        tokens = pull.claim.tokens
        none = self._rng.random() < 0.5
        destination = Destination((), tokens) if none else Destination(self._blocks(state, tokens))
        return GiveDestination(CALL, pull.name, destination)

    def _add_part(self, state: NodeState) -> FinishedBlocks | None:
        """Adds a part to a push, or ends it."""
        pushes = list(state.send.pushes)
        if not pushes:
            return None
        push = self._rng.choice(pushes)
        content = push.content or self._content()
        ends = push.parts is not None and self._rng.random() < 0.5
        blocks = () if ends else self._blocks(state, content.tokens)
        return FinishedBlocks(
            CALL, state.transfers.get(push.transfer_id).key, blocks, content, waits_for=WaitsFor.REGISTRATION,
            part_epoch=push.part_epoch + (0 if ends else self._rng.randrange(2)), last=ends,
        )  # fmt: skip

    def _free(self, state: NodeState) -> FreeBlocks:
        """Frees blocks by number."""
        return FreeBlocks(CALL, self._blocks(state, self._rng.choice(TOKENS)), self._stated(state))

    # -- allocations

    def _free_allocation(self, state: NodeState) -> FreeBlocks | None:
        named = self._allocation(state)
        return FreeBlocks(CALL, allocation_id=named) if named else None

    def _allocate(self, _: NodeState) -> AllocateBlocks:
        return AllocateBlocks(CALL, ((0, 1),), reclaim=self._rng.random() < 0.5)

    def _renew(self, state: NodeState) -> AllocateBlocks | None:
        """Renews an allocation, so that it ends soon."""
        named = self._allocation(state)
        return AllocateBlocks(CALL, (), ttl_s=1.0, allocation_id=named) if named else None

    def _give_allocation(self, state: NodeState) -> GiveAllocation | None:
        """Gives an allocation to itself."""
        named = self._allocation(state)
        return GiveAllocation(CALL, named, ANONYMOUS) if named else None

    def _cancel(self, state: NodeState) -> CancelTransfer | None:
        """Cancels nothing, and frees an allocation with it."""
        named = self._allocation(state)
        return CancelTransfer(CALL, key=self._key(), free_allocation_ids=(named,)) if named else None

    # -- others

    def _acknowledge(self, state: NodeState) -> AcknowledgeTransfers | None:
        """Acknowledges transfers whose end their engine may not know yet."""
        ids = [transfer.id for transfer in state.transfers if transfer.settled]
        return AcknowledgeTransfers(CALL, tuple(ids)) if ids else None

    def _reclaim(self, _: NodeState) -> ReclaimBlocks:
        return ReclaimBlocks(CALL, ((0, self._rng.choice((1, 8))),))

    def _key(self) -> bytes:
        return self._rng.randbytes(16)

    def _content(self) -> ContentId:
        return ContentId(self._rng.choice(TOKENS), opaque=b"a stranger's")

    def _blocks(self, state: NodeState, tokens: int) -> BlockLists:
        """Returns random blocks of each group for that many tokens, used or not. Groups of one space get different
        ones.
        """
        pool = state.life.engine.pool
        left = {s: self._rng.sample(range(g.blocks), g.blocks) for s, g in zip(pool.spaces, pool.groups, strict=True)}
        rows: list[tuple[int, Ids]] = []
        for i, (space, group) in enumerate(zip(pool.spaces, pool.groups, strict=True)):
            count = group.blocks_of(tokens)
            rows.append((i, np.array(left[space][:count], dtype=np.int64)))
            del left[space][:count]
        return tuple(rows)

    def _allocation(self, state: NodeState) -> str:
        """Returns an allocation of the engine, or "" if it has none."""
        found = list(state.pool.allocator.kept_bytes)
        return str(self._rng.choice(found)) if found else ""

    def _stated(self, state: NodeState) -> str:
        """Returns the allocation that it claims for blocks, or ""."""
        return self._allocation(state) if self._rng.random() < 0.5 else ""
