"""Checks that a cancel ends both sides: the other side is told, and ends CANCELLED unless it was already over.

Each lead is checked by itself: what it says when it is cancelled, and what it does when it hears that its peer was.
"""

from collections.abc import Iterator

from kvgrpc.core.actions import Action, SendClose
from kvgrpc.core.events import AccessClosing, CancelScope, CancelTransfer, CloseAccess, CloseOutcome, Event
from kvgrpc.core.node import Node
from kvgrpc.core.state.move import PullMove
from kvgrpc.core.tables.accesses import AccessState
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.transfers import Direction, State, Transfer
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.ids import peer_key
from sim.rules import Rule, broken


class CancelAudit:
    """The cancels of one lead."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._to_tell: dict[bytes, tuple[str, str]] = {}
        """Accesses whose other side must be told now: the transfer here, and the peer."""
        self._told: list[str] = []
        """Transfers that must end."""
        self._one_less: list[tuple[Lease, str]] = []
        """Leases, with the consumer that was cancelled."""

    def hears(self, event: Event, now: float) -> None:
        """Takes note of an event before the node handles it. The event is skipped if a timer is due, which acts
        first.
        """
        due = self._node.state.timers.next_deadline()
        if due is not None and due <= now:
            return
        if isinstance(event, CancelTransfer) and event.scope is not CancelScope.THIS_SIDE and not event.validate_only:
            self._cancelled(event)
        elif isinstance(event, CloseAccess):
            life = peer_key(event.engine_id, event.incarnation)
            row = (
                event.closings[0] if len(event.closings) == 1 else None
            )  # one of several may already be over by an earlier one
            if row is not None and row.outcome is CloseOutcome.CANCELLED and self._speaks(life, event):
                self._heard(life, row)

    def says(self, actions: list[Action]) -> None:
        """Checks the node's actions."""
        if not (self._to_tell or self._told or self._one_less):
            return
        said = {action.closing.access_id: action.closing.outcome for action in actions if isinstance(action, SendClose)}
        for access_id, (transfer_id, peer) in self._to_tell.items():
            later = access_id in self._node.state.moves.closes.following
            if self._is_cancelled(transfer_id) and not later and said.get(access_id) is not CloseOutcome.CANCELLED:
                broken(Rule.R5, f"{transfer_id} was cancelled, and {peer} is not told so", transfer_id)
        for transfer_id in self._told:
            if not self._is_cancelled(transfer_id):
                broken(Rule.R5, f"{transfer_id} goes on although its source was cancelled", transfer_id)
        for lease, consumer in self._one_less:
            if lease.live and consumer not in lease.finished:
                broken(Rule.R5, f"{consumer} was cancelled, and {lease.id} still waits for it", lease.id)
            if not lease.live and len(lease.finished) < lease.consumers:
                message = f"{lease.id} has ended for all of {lease.consumers} consumers, since {consumer} was cancelled"
                broken(Rule.R4, message, lease.id, lease.transfer_id)
        self._to_tell.clear()
        self._told.clear()
        self._one_less.clear()

    def _speaks(self, life: str, event: CloseAccess) -> bool:
        """Returns True if that life is known, and its caller shows its proof."""
        state = self._node.state
        return state.peers.live_on(life) and state.peers.lives[life].proves(event.call.proof)

    def _cancelled(self, event: CancelTransfer) -> None:
        transfers = self._node.state.transfers
        found = transfers.find(event.transfer_id)
        for transfer in transfers.with_key(event.key) if event.key else [found] if found else []:
            aborted = event.scope is CancelScope.ON_ABORT and transfer.direction is Direction.RECEIVE
            if not transfer.over and not aborted:  # the source decides what an abort means
                for access_id, peer in self._accesses(transfer):
                    if self._node.state.peers.live_on(peer):
                        self._to_tell[access_id] = transfer.id, peer

    def _accesses(self, transfer: Transfer) -> Iterator[tuple[bytes, str]]:
        """Yields the accesses between both sides, with the peer of each."""
        state = self._node.state
        push = state.send.pushes.find(transfer.id)
        lease = state.send.leases.find(transfer.lease_id)
        if transfer.direction is Direction.RECEIVE:
            move = state.receive.transfers[transfer.id]
            if move.access_id:
                yield move.access_id, move.peer
        elif push is not None:
            yield from ((move.access_id, move.peer) for move in push.live if move.access_id)
        elif lease is not None:
            yield from ((access_id, state.access.rows[access_id].peer) for access_id in lease.accesses)

    def _heard(self, life: str, row: AccessClosing) -> None:
        """Takes note that a peer says that it was cancelled."""
        state = self._node.state
        move = state.moves.of_access(row.access_id)
        access = state.access.rows.get(row.access_id)
        if access is None and type(move) is PullMove and move.peer == life:
            transfer = state.transfers.get(move.transfer_id)
            self._told += [] if transfer.over else [transfer.id]
        if access is None or access.peer != life or access.state is not AccessState.OPEN:
            return
        if access.kind is AccessKind.WRITE:
            self._told.append(state.receive.targets[access.lease_id].transfer_id)
        elif (lease := state.send.leases.find(access.lease_id)) is not None and lease.live:
            self._one_less.append((lease, access.consumer))

    def _is_cancelled(self, transfer_id: str) -> bool:
        transfer = self._node.state.transfers.find(transfer_id)
        return transfer is None or transfer.state is State.CANCELLED
