"""A caller of another tenant changes nothing of a tenant's, by any call, although it knows every id, key and grant."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.owners import of_tenant
from kvgrpc.core.values.sends import SendAsk
from kvgrpc.errors import KVGrpcError
from tests.core.nodes import Lead, access_id, claim, content, describe, grant, ids, lists, snapshot

RED, BLUE = of_tenant("red", "dns:r"), of_tenant("blue", "dns:b")
D, E = describe("d", 2), describe("e", 3)
HANDED, RESERVED, PUSHED, PULLED = (bytes([key]) * 16 for key in range(1, 5))
OF_THE_HOUSE = {
    events.ConnectPeer, events.HandshakeReceived, events.ReleaseQuarantine, events.StartDrain, events.CancelDrain,
}  # fmt: skip
"""Calls that name nothing of a tenant's, or are for operators, who have none."""


class Scene:
    """A lead with things of one tenant: a hand-over that is read, a reservation, a push, a pull and an allocation."""

    def __init__(self) -> None:
        lead = self.lead = Lead(describe(pool_kind=PoolKind.SERVER_MANAGED))
        lead.admit(D)
        lead.admit(E)
        self.given = [lead.call(lambda c: events.AllocateBlocks(c, ((0, 1),)), RED) for _ in range(3)]
        handed, reserved = self.lists(0), self.lists(1)
        self.handed = lead.finish(
            16, blocks=handed, key=HANDED, principal=RED, allocation_id=self.given[0].allocation_id, consumers=2
        )
        opening = AccessOpening(access_id(1), self.handed.token, claim(16))
        lead.answer(lead.ask(lambda c: events.OpenAccess(c, "d", 2, (opening,)), RED))
        self.reserved = lead.call(
            lambda c: events.ReserveBlocks(
                c, RESERVED, reserved, content(16), allocation_id=self.given[1].allocation_id
            ),
            RED,
        )
        self.writes = grant(D, access=AccessKind.WRITE, key=PUSHED, tenant="red")
        self.pushed = lead.call(lambda c: events.RegisterPush(c, self.writes, "", access_id(2), access_id(3)), RED)
        self.reads = grant(D, key=PULLED, tenant="red")
        self.pulled = lead.pull(self.reads, 32, number=4, principal=RED)

    def lists(self, number: int) -> Any:
        return lists(self.given[number].blocks[0].tolist())

    def transfers(self) -> list[str]:
        made = self.handed.transfer, self.reserved.transfer, self.pushed.transfer, self.pulled
        return [transfer.id for transfer in made]

    def shown(self) -> Any:
        """Returns all that the tenant has, as values."""
        state = self.lead.state
        names = self.transfers()
        return snapshot([
            state.send.leases.find(self.handed.lease.id),
            state.access.rows[access_id(1)],
            [state.transfers.find(name) for name in names],
            [state.receive.transfers.get(name) for name in names],
            [state.send.pushes.find(name) for name in names],
            [state.timers.when(timer, name) for timer in (Timer.RENDEZVOUS, Timer.REGISTRATION) for name in names],
            [state.pool.allocator.owner(given.allocation_id) for given in self.given],
            [state.tombstones.check_key(key, tenant="red") for key in (HANDED, RESERVED, PUSHED, PULLED)],
        ])  # fmt: skip


Attack = Callable[[Call, Scene], Any]


def finished(**fields: Any) -> Attack:
    """Hands over a block of the caller's own, with these fields."""

    def make(call: Call, scene: Scene) -> events.FinishedBlocks:
        own = scene.lead.call(lambda c: events.AllocateBlocks(c, ((0, 1),)), BLUE)
        made = {"allocation_id": own.allocation_id} | {
            name: value(scene) if callable(value) else value for name, value in fields.items()
        }
        return events.FinishedBlocks(call, blocks=lists(own.blocks[0].tolist()), content=content(16), **made)

    return make


def closing(token: Callable[[Scene], bytes], outcome: events.CloseOutcome, number: int = 9) -> Attack:
    return lambda c, s: events.CloseAccess(
        c, "e", 3, (events.AccessClosing(access_id(number), outcome, quiesced=True, token=token(s)),)
    )


PUSHES = events.WaitsFor.REGISTRATION
DROPPED, CANCELLED = events.CloseOutcome.DROPPED, events.CloseOutcome.CANCELLED
ATTACKS: dict[str, Attack] = {
    "hands its blocks over": lambda c, s: events.FinishedBlocks(
        c, b"9" * 16, s.lists(2), content(16), allocation_id=s.given[2].allocation_id
    ),
    "hands over under its key": finished(key=PUSHED, takes_registrations=True),
    "adds a part to its push": finished(key=PUSHED, waits_for=PUSHES),
    "gives up its push": finished(key=PUSHED, waits_for=PUSHES, failure="no"),
    "gives up a push that will come": finished(key=HANDED, waits_for=PUSHES, failure="no"),
    "expects its push": finished(key=PUSHED, waits_for=PUSHES, expected=True),
    "stands for its lease": finished(key=b"9" * 16, ttl_s=60.0, stands_for=lambda s: (s.handed.lease.id,)),
    "pulls by its grant": lambda c, s: events.PullBlocks(c, s.reads, content(32), access_id(8)),
    "gives its pull blocks": lambda c, s: events.GiveDestination(
        c, s.pulled.id, events.Destination(s.lists(2), 0, s.given[2].allocation_id)
    ),
    "renews": lambda c, s: events.RenewLeases(
        c,
        (
            events.LeaseRef(s.handed.lease.id),
            events.LeaseRef("", s.handed.token),
            *(events.LeaseRef(key=key) for key in (HANDED, PUSHED)),
        ),
        60.0,
    ),
    "releases by id": lambda c, s: events.ReleaseLease(c, events.LeaseRef(s.handed.lease.id)),
    "releases by its grant": lambda c, s: events.ReleaseLease(c, events.LeaseRef("", s.handed.token)),
    **{
        f"cancels {number}": lambda c, s, number=number: events.CancelTransfer(c, s.transfers()[number])  # type: ignore[misc]
        for number in range(4)
    },
    **{
        f"cancels key {key[0]}": lambda c, s, key=key: events.CancelTransfer(c, key=key)  # type: ignore[misc]
        for key in (HANDED, RESERVED, PUSHED, PULLED)
    },
    "acknowledges": lambda c, s: events.AcknowledgeTransfers(c, tuple(s.transfers())),
    "renews its allocation": lambda c, s: events.AllocateBlocks(c, (), allocation_id=s.given[2].allocation_id),
    "takes back": lambda c, s: events.ReclaimBlocks(c, ((0, 60),)),
    "frees its allocation": lambda c, s: events.FreeBlocks(c, (), s.given[2].allocation_id),
    "frees its blocks": lambda c, s: events.FreeBlocks(c, s.lists(2)),
    "takes its allocation": lambda c, s: events.GiveAllocation(c, s.given[2].allocation_id, BLUE),
    "opens its grant": lambda c, s: events.OpenAccess(
        c, "e", 3, (AccessOpening(access_id(9), s.handed.token, claim(16)),)
    ),
    "opens its reservation": lambda c, s: events.OpenAccess(
        c, "e", 3, (AccessOpening(access_id(9), s.reserved.token, None, push_content=content(16)),)
    ),
    "opens its access": lambda c, s: events.OpenAccess(
        c, "e", 3, (AccessOpening(access_id(1), s.handed.token, claim(16)),)
    ),
    "settles its access": lambda c, s: events.SettleAccess(c, "e", 3, (events.AccessSettling(access_id(1), True),)),
    "closes its access": closing(lambda s: s.handed.token, DROPPED, 1),
    "drops its grant": closing(lambda s: s.handed.token, DROPPED),
    "cancels its grant": closing(lambda s: s.handed.token, CANCELLED),
    "cancels its reservation": closing(lambda s: s.reserved.token, CANCELLED),
    "cancels its registration": closing(lambda s: s.writes, CANCELLED),
    "cancels its push by a grant": closing(lambda s: grant(E, access=AccessKind.WRITE, key=PUSHED), CANCELLED),
    "drops its push by a grant": closing(lambda s: grant(E, access=AccessKind.WRITE, key=PUSHED), DROPPED),
    "registers for its push": lambda c, s: events.RegisterPush(
        c, grant(E, access=AccessKind.WRITE, key=PUSHED), "", access_id(8), access_id(9)
    ),
    "registers by its grant": lambda c, s: events.RegisterPush(c, s.writes, "", access_id(8), access_id(9)),
    "reserves its blocks": lambda c, s: events.ReserveBlocks(
        c, b"9" * 16, s.lists(2), content(16), allocation_id=s.given[2].allocation_id
    ),
    "adds parts": lambda c, s: events.PartsReady(c, "e", 3, access_id(1), ()),
    "sums up": lambda c, s: events.ChecksumBlocks(c, "e", 3, access_id(1), ((s.lists(0), None),)),
    "has it sent": lambda c, s: events.PostSend(c, "e", 3, access_id(1), SendAsk(0, 0, 1, 0, ids(0), ids(1))),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_caller_of_another_tenant_changes_nothing_of_a_tenants(name: str) -> None:
    scene = Scene()
    before = scene.shown()
    with contextlib.suppress(KVGrpcError):
        scene.lead.answer(scene.lead.ask(lambda c: ATTACKS[name](c, scene), BLUE))
    assert scene.shown() == before


def test_every_call_that_names_a_thing_is_tried() -> None:
    scene = Scene()
    tried = {type(attack(Call(1_000 + number, BLUE), scene)) for number, attack in enumerate(ATTACKS.values())}
    calls = {kind for kind in scene.lead.node._handlers if "call" in kind.__annotations__}
    assert tried | OF_THE_HOUSE == calls
