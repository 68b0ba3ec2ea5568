"""Performs the actions of a host's node, and checks each of them."""

from collections.abc import Callable
from typing import Any, Protocol

from kvgrpc.core.actions import (
    Action,
    AnswerSend,
    AwaitEnd,
    BlocksLacking,
    ComputeChecksums,
    CopyOut,
    Dial,
    Expect,
    HangUp,
    MakeOffer,
    MapPeer,
    Post,
    Refuse,
    Rekey,
    Reply,
    Send,
    SendChecksums,
    SendClose,
    SendOpen,
    SendParts,
    SendPostSend,
    SendRegister,
    SendRenew,
    SendRenewKeys,
    SendSettle,
    TellEngine,
    TransferChanged,
    UnmapPeer,
)
from kvgrpc.core.events import EndpointOffered, Event
from kvgrpc.core.node import Node
from kvgrpc.core.values.endpoints import CollectiveEndpoint, LoopbackEndpoint, RankEndpoint
from sim.checks.accounts import LeadAccounts
from sim.checks.audit import Audit
from sim.checks.lease_times import claims_of
from sim.checks.sends import check_number, check_sent
from sim.hosts.peer_calls import Caller, PeerCalls
from sim.world.memory import MemoryDoor
from sim.world.mover import Mover
from sim.world.surroundings import Surroundings


class PerformingHost(Caller, Protocol):
    """View of the host. Its engine and mover are those of its present life."""

    ledger: LeadAccounts
    node: Node

    @property
    def audit(self) -> Audit: ...

    @property
    def mover(self) -> Mover: ...

    @property
    def tells(self) -> bool: ...

    def handle(self, event: Event) -> None: ...

    def soon(self, do: Callable[[], None]) -> None: ...

    def clock(self) -> float: ...

    @property
    def lies(self) -> bool: ...

    def lied_to(self, transfer_id: str) -> bool: ...

    def door(self, rank: int) -> MemoryDoor: ...

    def rekey(self, rank: int) -> None: ...

    def tell_engine(self, action: TellEngine) -> None: ...


class ActionPerformer:
    """Performs the actions of one host."""

    def __init__(self, host: PerformingHost, world: Surroundings) -> None:
        self._host = host
        self._world = world
        peers = self._peers = PeerCalls(host, world.network)
        self._deeds: dict[type[Action], Callable[[Any], None]] = {
            Reply: lambda action: host.ledger.answered(action.call_id, action.answer),
            Refuse: lambda action: host.ledger.answered(action.call_id, action.error),
            Dial: peers.dial,
            HangUp: self._hang_up,
            SendOpen: self._open,
            SendSettle: self._settle,
            SendClose: self._close,
            SendRenew: peers.renew,
            SendRenewKeys: peers.renew_keys,
            SendParts: peers.parts,
            SendRegister: peers.register,
            SendChecksums: peers.checksums,
            SendPostSend: peers.post_send,
            Send: self._send,
            AnswerSend: self._answer_send,
            MakeOffer: self._offer,
            MapPeer: self._map,
            UnmapPeer: self._unmap,
            ComputeChecksums: lambda action: host.mover.sum(action),  # noqa: PLW0108 - the mover of the life at that time
            CopyOut: lambda action: host.mover.copy_out(action),  # noqa: PLW0108 - as above
            Post: self._post,
            AwaitEnd: lambda action: host.mover.ends.look(action),  # noqa: PLW0108 - as above
            Rekey: lambda action: host.rekey(action.rank),
            Expect: self._expect,
            TransferChanged: self._changed,
            TellEngine: host.tell_engine,
            BlocksLacking: lambda _: None,
        }

    def perform(self, action: Action) -> None:
        """Performs an action."""
        self._deeds[type(action)](action)

    def _offer(self, action: MakeOffer) -> None:
        key = self._host.door(action.rank).key
        nbytes = self._host.description.pool.total_bytes
        sends = CollectiveEndpoint("simulated", nbytes, 1) if self._host.address in self._world.collective else None
        endpoint = RankEndpoint(action.rank, loopback=LoopbackEndpoint(key, nbytes), collective=sends)
        offered = EndpointOffered(action.rank, action.key, endpoint)
        self._host.mover.answer(action.rank, lambda: self._host.handle(offered))

    def _map(self, action: MapPeer) -> None:
        loopback = action.endpoint.loopback
        self._host.mover.map(action, None if loopback is None else self._world.doors.get(loopback.key))

    def _unmap(self, action: UnmapPeer) -> None:
        if self._host.tells:  # otherwise its own life is over, and so is its memory
            self._host.audit.unmaps(action, self._host.ledger.writes)
        self._host.mover.unmap(action)

    def _post(self, action: Post) -> None:
        self._host.audit.posts(action)
        self._host.mover.post(action)
        for lurk in self._world.ambushes:
            lurk(self._host.address, self._world.network.home(action.peer))
        self._world.ambushes.clear()

    def _send(self, action: Send) -> None:
        if not self._host.lies and not action.ask.meets:
            check_sent(action, self._host.node.state)
        self._host.mover.send(action)

    def _answer_send(self, action: AnswerSend) -> None:
        mover = self._host.mover
        honest = not self._host.lies and not self._world.lies(action.peer)

        def answer() -> None:
            if mover.answered(action) and honest:
                check_number(action)

        mover.later(action.rank, 0.0, answer)

    def _expect(self, action: Expect) -> None:
        self._host.ledger.expected(action)
        if action.writes:
            self._host.audit.expects(action)

    def _open(self, action: SendOpen) -> None:
        self._host.audit.asks(action)
        claims = claims_of(action.opening.token)
        self._world.names += (action.opening.transfer_id, *(() if claims is None else (claims.lease_id,)))
        self._world.asked(action.opening.access_id, self._world.network.home(action.peer))
        if action.opening.reverse_access_id:
            self._world.asked(action.opening.reverse_access_id, self._host.address)
        self._peers.open(action)

    def _settle(self, action: SendSettle) -> None:
        self._host.audit.settles(action)
        self._peers.settle(action)

    def _close(self, action: SendClose) -> None:
        self._host.audit.closes(action)
        self._peers.close(action)

    def _hang_up(self, action: HangUp) -> None:
        self._host.audit.hangs_up(action)
        self._world.network.hang_up(self._host, action.peer)

    def _changed(self, action: TransferChanged) -> None:
        self._host.audit.changed(action)
        if not self._host.lies and not self._host.lied_to(action.transfer.id):
            self._host.mover.check_blamed(action.transfer)
        self._host.ledger.changed(action.transfer, self._host.clock(), attached=self._host.tells)
