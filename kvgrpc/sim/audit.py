"""What is checked of one lead: the blocks and accesses that an event touches, and now and then everything.

The lead is seen through what it says and through its tables; the world around it knows what is true. So what one lead
believes is compared with what another one said, what movers do, and what engines use.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from kvgrpc.core import grants
from kvgrpc.core.actions import Action, Openings, Post, Renewed, Reply, SendOpen, TransferChanged
from kvgrpc.core.events import (
    AccessAnswered,
    CloseAccess,
    Event,
    LeaseRef,
    OpenAccess,
    Opened,
    RegisterPush,
    RenewLeases,
)
from kvgrpc.core.layout import PoolLayout
from kvgrpc.core.node import Node
from kvgrpc.core.operation import Operation
from kvgrpc.core.pins import EXCLUSIVE, Pin, PinKind
from kvgrpc.core.transfers import Direction
from kvgrpc.errors import KVGrpcError
from kvgrpc.sim.engine import Engine
from kvgrpc.sim.memory import Memory
from kvgrpc.sim.rules import Rule, broken

SLACK_S = 1e-6
"""For the rounding of virtual time."""


class Audit:
    """One lead in one life of its process. `opened` are the accesses that any issuer in the world has granted."""

    def __init__(self, node: Node, opened: set[bytes]) -> None:
        self._node = node
        self._opened = opened
        self._asked: dict[bytes, str] = {}
        """Transfers of pulls, by the access that was asked for."""
        self._access: dict[str, bytes] = {}
        """The access under which a transfer's blocks move, by the transfer that they fill."""
        self._openings: dict[int, OpenAccess] = {}
        """OpenAccess calls that are not answered, by number."""
        self._renewals: dict[int, tuple[tuple[str, float], ...]] = {}
        """Leases of RenewLeases calls, and their deadlines before; 0 where they were over."""
        self._consumers: defaultdict[bytes, set[str]] = defaultdict(set)
        """Engines that had to do with a transfer key, as consumers."""
        self._ears: dict[type[Event], Callable[[Any], None]] = {
            OpenAccess: self._opening,
            CloseAccess: lambda event: self._consume(event.engine_id, *(row.token for row in event.closings)),
            RegisterPush: lambda event: self._register(event.token),
            RenewLeases: self._renewing,
            AccessAnswered: self._answered,
        }

    def hears(self, event: Event) -> None:
        """Before the node handles an event."""
        hear = self._ears.get(type(event))
        if hear is not None:
            hear(event)

    def says(self, actions: list[Action]) -> None:
        """After the node handled it, and before anything is done of what it asks for."""
        if not self._openings and not self._renewals:
            return
        for action in actions:
            if not isinstance(action, Reply):
                continue
            answer = action.answer
            if isinstance(answer, Openings):
                self._granted(self._openings.pop(action.call_id), answer)
            elif isinstance(answer, Renewed):
                self._renewed(self._renewals.pop(action.call_id), answer)

    def asks(self, action: SendOpen) -> None:
        """It asks a peer for an access."""
        opening = action.opening
        if opening.push_content is None:
            self._asked[opening.access_id] = opening.transfer_id
        elif opening.reverse_access_id:
            self._opened.add(opening.reverse_access_id)

    def posts(self, action: Post) -> None:
        """It lets bytes move: the access is open, and what is written or read is pinned."""
        pins = self._node.state.pins
        if action.operation is Operation.READ:
            fills, pinned = action.transfer_id, pins.has(action.transfer_id, PinKind.TARGET)
        else:
            name = action.posting_id.rpartition("/")[0]
            fills, pinned = action.fills, pins.has(name, PinKind.ACCESS)
        if self._access.get(fills) not in self._opened:
            broken(Rule.R2, f"{action.transfer_id} moves bytes before its access is open", action.transfer_id, fills)
        if not pinned:
            broken(Rule.R1, f"{action.transfer_id} moves bytes of blocks that it does not pin", action.transfer_id)

    def changed(self, action: TransferChanged) -> None:
        """A transfer changed: no more consumers are done than there are engines that may be."""
        transfer = action.transfer
        if transfer.direction is Direction.SEND and transfer.consumers_done:
            known = self._consumers[transfer.key]
            if transfer.consumers_done > len(known):
                message = f"{transfer.consumers_done} consumers of {transfer.id} are done, of {len(known)} that came"
                broken(Rule.R4, message, transfer.id, *sorted(known))

    def everything(self, engine: Engine, memories: list[Memory], pool: PoolLayout, *, voided: bool) -> None:
        """The tables agree with each other, with what the engine uses, and with the memory. `voided`: the engine has
        taken blocks back of which the lead does not know yet.
        """
        for lease in self._node.state.leases:
            if not self._node.state.now < lease.deadline <= lease.cap:
                broken(Rule.R8, f"{lease.id} lives after its time", lease.id)
        try:
            self._node.check()
        except AssertionError as error:
            broken(Rule.R1, f"the tables of the lead do not agree: {error}")
        exclusive: set[int] = set()
        for pin in self._node.state.pins:
            self._check_pin(pin, engine, voided=voided)
            if pin.kind in EXCLUSIVE:
                exclusive.update(_cells(pin, pool))
        for memory in memories:
            if memory.given.keys() != exclusive:
                cell = min(memory.given.keys() ^ exclusive)
                owner = memory.given.get(cell, "nobody")
                broken(Rule.R1, f"cell {cell} belongs to {owner}, which is not what the lead's pins say", owner)

    def _check_pin(self, pin: Pin, engine: Engine, *, voided: bool) -> None:
        if voided and pin.kind not in EXCLUSIVE:
            return
        for group, ids in enumerate(pin.blocks):
            for block in ids.tolist():
                if not engine.uses(group, block):
                    broken(Rule.R1, f"{pin.kind.value} {pin.owner} pins block {block}, which is free", pin.owner)

    def _opening(self, event: OpenAccess) -> None:
        self._openings[event.call.id] = event
        self._consume(event.engine_id, *(opening.token for opening in event.openings))

    def _renewing(self, event: RenewLeases) -> None:
        self._renewals[event.call.id] = tuple(map(self._deadline, event.leases))

    def _answered(self, event: AccessAnswered) -> None:
        if isinstance(event.result, Opened):
            fills = self._asked.get(event.access_id) or event.result.transfer_id
            self._access[fills] = event.access_id

    def _granted(self, event: OpenAccess, answer: Openings) -> None:
        for opening, row in zip(event.openings, answer.rows, strict=True):
            if isinstance(row, Opened):
                self._opened.add(opening.access_id)
                if opening.reverse_access_id:
                    self._access[row.transfer_id] = opening.reverse_access_id

    def _consume(self, engine_id: str, *tokens: bytes) -> None:
        for token in tokens:
            claims = _claims(token)
            if claims is not None:
                self._consumers[claims.transfer_key].add(engine_id)

    def _register(self, token: bytes) -> None:
        claims = _claims(token)
        if claims is not None:
            self._consumers[claims.transfer_key].add(claims.engine_id)

    def _deadline(self, ref: LeaseRef) -> tuple[str, float]:
        """A lease and when it ends; 0 for one that is over."""
        lease_id = ref.lease_id
        if ref.token:
            claims = _claims(ref.token)
            lease_id = "" if claims is None else claims.lease_id
        lease = self._node.state.leases.find(lease_id)
        return lease_id, lease.deadline if lease is not None and lease.live else 0.0

    def _renewed(self, before: tuple[tuple[str, float], ...], answer: Renewed) -> None:
        state = self._node.state
        for (lease_id, deadline), (left_s, refused) in zip(before, answer.rows, strict=True):
            if refused is not None:
                continue
            lease = state.leases.find(lease_id)
            if not deadline or lease is None:
                broken(Rule.R8, f"{lease_id} is renewed, but it is over", lease_id)
            if lease.live and lease.deadline < deadline:
                broken(Rule.R8, f"a renewal shortens {lease_id} by {deadline - lease.deadline:.3f} s", lease_id)
            if left_s > lease.cap - state.now + SLACK_S:
                broken(Rule.R8, f"{lease_id} is renewed past its cap", lease_id)


@lru_cache(maxsize=1024)
def _claims(token: bytes) -> grants.Claims | None:
    """What a grant says, None where it is none."""
    try:
        return grants.read_claims(token)
    except KVGrpcError:
        return None


def _cells(pin: Pin, pool: PoolLayout) -> list[int]:
    return [
        region.offset + block * region.stride_bytes
        for region in pool.regions
        for block in pin.blocks[region.group].tolist()
    ]
