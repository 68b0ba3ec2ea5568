"""Audits one lead: the blocks and accesses that an event touches, and now and then everything.

The audit sees what the lead says and what is in its tables, while the world around the lead knows the truth. It
compares what one lead believes with what another one said, what movers do, and what engines use.
"""

from collections.abc import Callable
from typing import Any

from kvgrpc.core.actions import (
    Action,
    Answer,
    BlocksReserved,
    Expect,
    HangUp,
    Openings,
    Operation,
    Post,
    PullStarted,
    Refuse,
    Renewed,
    Reply,
    SendChecksums,
    SendClose,
    SendOpen,
    SendSettle,
    TransferChanged,
    UnmapPeer,
    Verdicts,
)
from kvgrpc.core.events import (
    AccessAnswered,
    ChecksumBlocks,
    CloseAccess,
    CloseOutcome,
    Event,
    FinishedBlocks,
    GiveDestination,
    OpenAccess,
    Opened,
    PartsAnswered,
    PartsReady,
    PeerSilent,
    PostingEnded,
    PullBlocks,
    RegisterPush,
    ReleaseLease,
    RenewLeases,
    ReserveBlocks,
    SettleAccess,
    SettleAnswered,
)
from kvgrpc.core.node import Node
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Direction, State, Transfer
from kvgrpc.core.values import grants
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.errors import Reason
from sim.checks.beliefs import Beliefs, Layers, Lies
from sim.checks.cancels import CancelAudit
from sim.checks.closings import CloseAudit
from sim.checks.consumers import Consumers
from sim.checks.lease_times import LeaseTimes, claims_of
from sim.checks.owners import of_stranger
from sim.checks.pinned import Uses, check_free, check_pins
from sim.checks.quarantine import QuarantineAudit
from sim.checks.reclaims import ReclaimAudit
from sim.checks.silences import Silences
from sim.checks.waits import WaitAudit
from sim.checks.writers import WriterAudit
from sim.rules import Rule, broken
from sim.world.memory import Memory

UNKNOWN = (Reason.NO_HANDSHAKE, Reason.NOT_PROVED)
"""Refusals of a lead that wants a new handshake first."""


class Audit:
    """The audit of one lead in one life of its process. It shares with the whole world: `opened`, the accesses that any
    issuer has granted; `vouched`, those whose issuer said that all bytes are valid; and `lies`, which knows the liars.
    """

    def __init__(self, node: Node, opened: set[bytes], vouched: set[bytes], lies: Lies = lambda _: False) -> None:
        state = node.state
        self._lies = lies
        self._beliefs = Beliefs(state, lies)
        self._node = node
        self._opened = opened
        self._vouched = vouched
        self._consumers = Consumers(state.peers.lives)
        self._closes = CloseAudit(state.limits, state.peers.lives)
        self._cancels = CancelAudit(node)
        self.proven = WriterAudit()
        self._waits = WaitAudit(state.limits)
        self._leases = LeaseTimes(state, self._waits)
        self._overdue = QuarantineAudit(state)
        self._reclaims = ReclaimAudit(state)
        self._asked: dict[bytes, str] = {}
        """Pulls' transfers, by the access that was asked for."""
        self._access: dict[str, bytes] = {}
        """Access under which a transfer's blocks move, by the transfer that they fill."""
        self._consumer: dict[bytes, tuple[bytes, str]] = {}
        """Transfer key of an access, and the engine that receives its blocks."""
        self._pushed: dict[bytes, bytes] = {}
        """Accesses that were asked for to push, by their ids and by the ids under which the destination reads."""
        self._closing: set[bytes] = set()
        """Accesses that were settled for the last time, with any verdict."""
        self._fills: dict[str, str] = {}
        """Transfer that a writing posting fills at a peer, by posting id."""
        self._outlived: set[str] = set()
        """Transfers filled by such postings that ended here but may go on there."""
        self._calls: dict[int, Event] = {}
        """Unanswered calls, by number."""
        self._silences = Silences(state)
        self._ears: dict[type[Event], Callable[[Any], None]] = {
            OpenAccess: self._opening,
            SettleAccess: self._asks,
            PartsReady: self._asks,
            ChecksumBlocks: self._asks,
            ReleaseLease: self._asks,
            CloseAccess: self._closed,
            RegisterPush: self._register,
            FinishedBlocks: lambda event: self._consumers.handed_over(event.key, event.on_abort),
            RenewLeases: self._renews,
            PullBlocks: self._asks,
            ReserveBlocks: self._asks,
            AccessAnswered: self._answered,
            PartsAnswered: lambda event: self._refused(event.access_id, event.error and event.error.reason),
            SettleAnswered: self._settled,
            PostingEnded: self._posting_ended,
        }

    def hears(self, event: Event, now: float) -> None:
        """Takes note of an event before the node handles it."""
        self._beliefs.hears(event)
        self._cancels.hears(event, now)
        self._reclaims.hears(event, now)
        self._waits.hears(event, now)
        self.proven.hears(event, self._node.state)
        self._consumers.time_passes(self._node.state.timers, now)
        hear = None if (strange := of_stranger(event)) else self._ears.get(type(event))
        if hear is not None:
            hear(event)
        elif isinstance(event, GiveDestination) and not strange:
            self._waits.given(event.transfer_id, now)
        elif isinstance(event, PeerSilent):
            self._silences.begins(event.peer, now)

    def says(self, actions: list[Action]) -> None:
        """Checks the node's actions before any of them is performed."""
        self._overdue.look(actions)
        self._cancels.says(actions)
        self._reclaims.says(actions)
        for action in actions:
            if isinstance(action, Reply):
                call = self._calls.pop(action.call_id, None)
                if call is not None:
                    self._beliefs.replied(call, action.answer)
                    self._replied(call, action.answer)
                if isinstance(action.answer, Renewed):
                    self._leases.renewed(action.call_id, action.answer)
            elif isinstance(action, Refuse):
                self._calls.pop(action.call_id, None)
                self._leases.refused(action.call_id)
            elif isinstance(action, SendChecksums):
                self._beliefs.compares(action)

    def asks(self, action: SendOpen) -> None:
        """Takes note that the lead asks a peer for an access."""
        opening = action.opening
        self._beliefs.asks(action)
        if opening.push_content is None:
            self._asked[opening.access_id] = opening.transfer_id
            self._closes.asked(opening.access_id, opening.transfer_id, action.peer)
            return
        claims = claims_of(opening.token)
        assert claims is not None
        self._consumers.came(claims.transfer_key, action.peer)  # maybe a later life of the engine that was named
        for access_id in filter(None, (opening.access_id, opening.reverse_access_id)):
            self._consumer[access_id] = claims.transfer_key, claims.engine_id
            self._pushed[access_id] = opening.access_id
        if opening.reverse_access_id:
            self._opened.add(opening.reverse_access_id)
        self._closes.asked(opening.access_id, opening.transfer_id, action.peer, opening.token)

    def settles(self, action: SendSettle) -> None:
        """Takes note that the lead asks a peer for its verdict."""
        self._beliefs.settles(action.settling)
        if action.settling.last:
            self._closing.add(action.settling.access_id)

    def closes(self, action: SendClose) -> None:
        """Takes note that the lead tells a peer that an access is over."""
        self._closes.over(action.closing.access_id)

    def hangs_up(self, action: HangUp) -> None:
        """Takes note that the lead has given up a life of a peer."""
        self._consumers.hung_up(action.peer)

    def life_began(self) -> None:
        """Forgets the last life."""
        self._beliefs.life_began()
        self._closes.life_began()
        self.proven.life_began()
        self._overdue.life_began()
        self._reclaims.life_began()
        self._waits.life_began()

    def posts(self, action: Post) -> None:
        """Checks that bytes may move: the access is open, and the blocks that are written or read are pinned."""
        self._beliefs.posts(action)
        pins = self._node.state.pool.pins
        if action.operation is Operation.READ:
            fills, pinned = action.transfer_id, pins.has(action.transfer_id, PinKind.TARGET)
        else:
            name = action.posting_id.rpartition("/")[0]
            fills, pinned = action.fills, pins.has(name, PinKind.ACCESS)
            self._fills[action.posting_id] = fills
        if not self._lies(action.peer) and self._access.get(fills) not in self._opened:
            broken(Rule.R2, f"{action.transfer_id} moves bytes before its access is open", action.transfer_id, fills)
        if not pinned:
            broken(Rule.R1, f"{action.transfer_id} moves bytes of blocks that it does not pin", action.transfer_id)

    def expects(self, action: Expect) -> None:
        """Takes note that the lead expects a source's writes, or no longer does."""
        self.proven.expects(action)

    def unmaps(self, action: UnmapPeer, open_writes: frozenset[str]) -> None:
        """Checks that a rank may forget a peer."""
        if not action.watch and self.proven.may_write(action.peer, open_writes):
            broken(Rule.END, f"rank {action.rank} forgets {action.peer}, which may write here", action.peer)

    def changed(self, action: TransferChanged) -> None:
        """Checks a changed transfer: its consumers are done, its bytes are vouched for, and it is not late."""
        transfer = action.transfer
        self._consumers.check(transfer)
        self._waits.changed(transfer, self._node.state.now)
        self.proven.changed(transfer)
        self._leases.touched(transfer.lease_id)
        if transfer.over:
            self._closes.ended(transfer.id, self._node.state.now)
        if transfer.direction is Direction.RECEIVE and transfer.state is State.SUCCEEDED:
            self._check_vouched(transfer)

    def check_quarantine(self, open_writes: frozenset[str]) -> None:
        """Checks the quarantine: see `WriterAudit.check`."""
        self.proven.check(self._node.state.transfers, open_writes)

    def saw_rest(self, transfer_id: str) -> bool:
        """Returns False if a posting for this transfer of a peer ended in a way after which bytes may still land."""
        return transfer_id not in self._outlived

    def everything(self, uses: Uses, memories: list[Memory], pool: PoolLayout, *, voided: bool) -> None:
        """Checks that the tables agree with each other, with the engine's uses, and with the memory. `voided` means
        that the engine has taken blocks back that the lead still counts.
        """
        self._leases.check()
        self.check_talk()
        try:
            self._node.check()
        except AssertionError as error:
            broken(Rule.R1, f"the tables of the lead do not agree: {error}")
        check_pins(self._node.state.pool.pins, uses, memories, voided=voided)
        check_free(self._node.state, pool)

    def check_talk(self) -> None:
        """Checks that nothing waits without end: peers are told of what is over, and silences and pulls end."""
        state = self._node.state
        self._waits.check(state.now)
        self._closes.check(state.now)
        self._silences.check()

    def check_arrived(self, transfer_id: str, blocks: Blocks, memories: list[Memory], layers: Layers) -> None:
        """Checks arrived KV: see `Beliefs.check_arrived`."""
        self._beliefs.check_arrived(transfer_id, blocks, memories, layers)

    def _check_vouched(self, transfer: Transfer) -> None:
        if self._lies(peer_key(transfer.peer_engine_id, transfer.peer_incarnation)):
            self._beliefs.succeeds(transfer, self._calls.values())
        elif self._access.get(transfer.id) not in self._vouched:
            broken(Rule.R2, f"{transfer.id} succeeds, and its source never said that it is valid", transfer.id)

    # -- events

    def _asks(self, event: Any) -> None:
        self._calls[event.call.id] = event

    def _renews(self, event: RenewLeases) -> None:
        self._asks(event)
        self._leases.asks(event)

    def _opening(self, event: OpenAccess) -> None:
        self._asks(event)
        for opening in event.openings:
            self._came(opening.token, event.engine_id, event.incarnation)

    def _closed(self, event: CloseAccess) -> None:
        self._asks(event)
        for row in event.closings:
            access = self._node.state.access.rows.get(row.access_id)
            own = access is not None and access.peer == peer_key(event.engine_id, event.incarnation)
            token = access.opening.token if access is not None and own else row.token
            claims = self._came(token, event.engine_id, event.incarnation)
            known = self._consumer.get(row.access_id, (b"", ""))
            if known[1] == event.engine_id:  # whatever grant it names
                self._consumers.closes(*known, row.outcome)
            if claims is not None:
                self._consumers.closes(claims.transfer_key, event.engine_id, row.outcome)
            self._closes.over(self._pushed.get(row.access_id, row.access_id))

    def _register(self, event: RegisterPush) -> None:
        claims = claims_of(event.token)
        if claims is not None:
            self._consumers.came(claims.transfer_key, peer_key(claims.engine_id, claims.incarnation))

    def _answered(self, event: AccessAnswered) -> None:
        if isinstance(event.result, Opened):
            fills = self._asked.get(event.access_id) or self._beliefs.fills(event)
            self._access[fills] = event.access_id
        elif not event.retryable:
            # A peer that does not know this lead may know of the push, and wait for its source to be at rest.
            if event.result.reason not in UNKNOWN or event.access_id not in self._pushed:
                self._closes.over(event.access_id)
            self._refused(event.access_id, event.result.reason)

    def _settled(self, event: SettleAnswered) -> None:
        result = event.result
        if isinstance(result, Verdict):
            self._refused(event.access_id, result.reason)
            if event.access_id in self._closing:
                self._over(event.access_id, result)
        elif result.reason is Reason.NO_HANDSHAKE and event.access_id not in self._pushed:
            self._closes.over(event.access_id)

    def _posting_ended(self, event: PostingEnded) -> None:
        fills = self._fills.pop(event.posting_id, "")
        if event.own_at_rest and fills:
            self._outlived.add(fills)

    def _came(self, token: bytes, engine_id: str, incarnation: int) -> grants.Claims | None:
        claims = claims_of(token)
        if claims is not None:
            self._consumers.came(claims.transfer_key, peer_key(engine_id, incarnation))
        return claims

    def _refused(self, access_id: bytes, reason: Reason | None) -> None:
        """Takes note that a push's destination has given up for good."""
        if reason is Reason.CANCELLED and access_id in self._consumer:
            self._consumers.closes(*self._consumer[access_id], CloseOutcome.CANCELLED)

    def _over(self, access_id: bytes, verdict: Verdict) -> None:
        """Takes note of the last verdict on an access."""
        if verdict.valid and access_id in self._consumer:
            self._consumers.received(*self._consumer[access_id])
        self._closes.over(access_id)
        if verdict.valid:
            self._closes.over(self._pushed.get(access_id, b""))

    # -- answers

    def _replied(self, event: Event, answer: Answer) -> None:
        if isinstance(event, OpenAccess) and isinstance(answer, Openings):
            self._granted(event, answer)
        elif isinstance(event, SettleAccess) and isinstance(answer, Verdicts):
            self._gave_verdicts(event, answer)
        elif isinstance(event, PullBlocks) and isinstance(answer, PullStarted) and answer.transfer is not None:
            self._waits.begun(answer.transfer, event)
        elif isinstance(event, ReserveBlocks) and isinstance(answer, BlocksReserved) and answer.transfer is not None:
            self._waits.reserved(answer.transfer, event.registration_timeout_s)
            self._beliefs.wants(answer.transfer.id, event)

    def _granted(self, event: OpenAccess, answer: Openings) -> None:
        peer = peer_key(event.engine_id, event.incarnation)
        for opening, row in zip(event.openings, answer.rows, strict=True):
            claims = claims_of(opening.token)
            if claims is not None:
                self._leases.touched(claims.lease_id)
            if not isinstance(row, Opened):
                continue
            self._opened.add(opening.access_id)
            if opening.push_content is None:
                if claims is not None:
                    self._consumer[opening.access_id] = claims.transfer_key, event.engine_id
                continue
            access_id = opening.reverse_access_id or opening.access_id
            self._access[row.transfer_id] = access_id
            self._closes.granted(access_id, row.transfer_id, peer)
            if not opening.reverse_access_id:
                self.proven.granted(access_id, row.transfer_id, peer)

    def _gave_verdicts(self, event: SettleAccess, answer: Verdicts) -> None:
        for settling, verdict in zip(event.settlings, answer.rows, strict=True):
            if settling.last:
                self._over(settling.access_id, verdict)
                if verdict.valid:
                    self._vouched.add(settling.access_id)
