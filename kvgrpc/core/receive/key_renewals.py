"""Renewals at a source by transfer key, for requests here that will take what it has.

A request that waits for blocks to be pushed into has neither a grant nor a reservation. A request with a reservation
may still wait for its prefill to be scheduled. Their engine lists these keys from time to time, and its lead asks the
source. Nothing is kept here: an engine that lists a key no more wants it no more.
"""

from math import isfinite

from kvgrpc.core.actions import Renewed, SendRenewKeys
from kvgrpc.core.events import KeysRenewed, RenewLeases
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.caller_budget import KEYS_A_RENEWAL
from kvgrpc.core.state.reservation import ReservationMove
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.limits import check_renewals, granted_ttl
from kvgrpc.errors import invalid


class KeyRenewals:
    """Renewals of all keys that this engine lists."""

    def __init__(self, state: NodeState, handshakes: Handshakes) -> None:
        self._state = state
        self._handshakes = handshakes

    def pass_on(self, event: RenewLeases) -> None:
        """Handles RenewLeases with a source: asks the source once. A source that is not connected is dialled for the
        next time. The number of keys asked for a caller is bounded, because nobody waits for the answer.
        """
        if (source := event.source) is None:
            return
        state, call = self._state, event.call
        _ = state.life.engine
        check_renewals(len(event.leases), state.limits)
        ttl_s = None if event.ttl_s is None else granted_ttl(event.ttl_s, state.limits)
        for ref in event.leases:
            if not ref.key:
                raise invalid("leases", "are transfer keys where they are at another lead")
            check_transfer_key(ref.key)
        self._handshakes.check_room(source.address, source.engine_id, 0, call.connection)
        state.receive.renewal_budget.check(call.connection, state.limits, state.now)
        if not event.validate_only and event.leases:
            peer = self._handshakes.want(source.address, source.engine_id, 0, call.trace, call.connection)
            if peer is not None:
                keys = tuple(ref.key for ref in event.leases)
                state.receive.renewal_budget.begin(call.connection, state.now, -(-len(keys) // KEYS_A_RENEWAL))
                state.emit(SendRenewKeys(peer.key, keys, ttl_s, call.trace))
        state.reply(call.id, Renewed(()))

    def answered(self, event: KeysRenewed) -> None:
        """Extends the registration deadlines of reservations to the time left at their source, up to their caps."""
        state = self._state
        for key, left_s in event.rows:
            for transfer in state.transfers.with_key(key):
                move = state.receive.transfers.get(transfer.id)
                if isinstance(move, ReservationMove) and move.peer == event.peer and isfinite(left_s):
                    due = state.timers.when(Timer.REGISTRATION, move.name)
                    later = min(state.now + left_s, move.cap)
                    if due is not None and later > due:
                        state.timers.set(Timer.REGISTRATION, move.name, later)
