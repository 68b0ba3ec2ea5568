"""Calls of one lead to others: a node's actions become messages, and the answers become events."""

from dataclasses import replace
from random import Random
from typing import Protocol

from kvgrpc.core.actions import (
    Checksums,
    Closings,
    Dial,
    Introduced,
    Openings,
    Registered,
    Renewed,
    SendChecksums,
    SendClose,
    SendOpen,
    SendParts,
    SendPostSend,
    SendRegister,
    SendRenew,
    SendRenewKeys,
    SendSettle,
    SendUnderWay,
    Verdicts,
)
from kvgrpc.core.events import (
    AccessAnswered,
    Call,
    ChecksumBlocks,
    ChecksumsAnswered,
    CloseAccess,
    CloseAnswered,
    DialFailed,
    HandshakeReceived,
    KeysRenewed,
    LeaseRef,
    OpenAccess,
    Opened,
    PartsAnswered,
    PartsReady,
    PeerAnswered,
    PostSend,
    PostSendAnswered,
    ProofRefused,
    RegisterAnswered,
    RegisterPush,
    RenewAnswered,
    RenewLeases,
    SettleAccess,
    SettleAnswered,
)
from kvgrpc.core.node import Node
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.sends import SendAnswer
from kvgrpc.errors import (
    DeadlineExceeded,
    Exhausted,
    InternalError,
    KVGrpcError,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from sim.world.faults import OPEN_TIMEOUT_S, RPC_TIMEOUT_S
from sim.world.network import Ask, Give, Network, NetworkLead, Result

BUSY = (Unavailable, Exhausted)
"""Errors after which a server retries. A settle is retried only without an answer, or to show its proof."""


SEND_TIMEOUTS_S = (1.0, 20.0)
"""Timeouts after which a caller takes a send for lost, in seconds: early, or when the source's lead must have given
up.
"""


class Caller(NetworkLead, Protocol):
    """The channels' view of their host."""

    node: Node

    @property
    def description(self) -> EngineDescription: ...


class PeerCalls:
    """The channels of one host."""

    def __init__(self, host: Caller, network: Network) -> None:
        self._host = host
        self._network = network
        self._rng = Random(host.address)  # noqa: S311 - a simulation, no secrets
        self._secrets = Random(f"{host.address}/told")  # noqa: S311 - as above

    def dial(self, action: Dial) -> None:
        """Makes a handshake, and opens the liveness stream after it."""
        me, asks = self._host.description, action.asks or self._secrets.randbytes(32)

        def give(result: Result) -> None:
            if isinstance(result, KVGrpcError):
                self._host.handle(DialFailed(action.address, result))
                return
            assert isinstance(result, Introduced)
            there = result.engine
            life = peer_key(there.engine_id, there.incarnation)
            if self._network.stream(self._host, life, (result.proof, asks)):
                self._host.handle(PeerAnswered(action.address, there, result.endpoints, result.proof, asks))
            elif self._network.takes_another(self._host.life, life, result.proof):
                error = PreconditionFailed(Reason.NOT_PROVED, "it was told something else meanwhile")
                self._host.handle(DialFailed(action.address, error))
            else:
                lost = Unavailable(Reason.PEER_UNREACHABLE, f"no liveness stream to {action.address}")
                self._host.handle(DialFailed(action.address, lost))

        self._network.rpc(
            self._host,
            action.to or action.address,
            lambda call: HandshakeReceived(
                call, me, action.endpoints, action.expected_engine_id, asks, proofs=action.proofs
            ),
            give,
        )

    def open(self, action: SendOpen) -> None:
        """Calls OpenAccess."""
        me = self._host.description

        def give(result: Result) -> None:
            row: Opened | KVGrpcError
            if isinstance(result, KVGrpcError):
                row = result
            else:
                assert isinstance(result, Openings)
                row = result.rows[0]
            self._host.handle(AccessAnswered(action.opening.access_id, row, isinstance(row, BUSY)))

        def ask(call: Call) -> OpenAccess:
            return OpenAccess(call, me.engine_id, me.incarnation, (action.opening,))

        self._ask(action.peer, ask, give, OPEN_TIMEOUT_S)

    def settle(self, action: SendSettle) -> None:
        """Calls SettleAccess."""
        me = self._host.description

        def give(result: Result) -> None:
            row: Verdict | KVGrpcError
            if isinstance(result, KVGrpcError):
                row = result
            else:
                assert isinstance(result, Verdicts)
                row = result.rows[0]
            self._host.handle(
                SettleAnswered(action.settling.access_id, row, isinstance(row, Unavailable) or _wants_proof(row))
            )

        def ask(call: Call) -> SettleAccess:
            return SettleAccess(call, me.engine_id, me.incarnation, (action.settling,))

        self._ask(action.peer, ask, give)

    def close(self, action: SendClose) -> None:
        """Calls CloseAccess."""
        me = self._host.description

        def give(result: Result) -> None:
            known = isinstance(result, Closings) or (
                isinstance(result, PreconditionFailed) and result.reason is Reason.NO_HANDSHAKE
            )
            self._host.handle(CloseAnswered(action.closing.access_id, known, action.closing.quiesced))

        def ask(call: Call) -> CloseAccess:
            return CloseAccess(call, me.engine_id, action.incarnation, (action.closing,))

        self._ask(action.peer, ask, give)

    def parts(self, action: SendParts) -> None:
        """Calls PartsReady."""
        me = self._host.description

        def give(result: Result) -> None:
            error = result if isinstance(result, KVGrpcError) else None
            self._host.handle(PartsAnswered(action.access_id, error, _again(error)))

        def ask(call: Call) -> PartsReady:
            return PartsReady(call, me.engine_id, me.incarnation, action.access_id, action.parts)

        self._ask(action.peer, ask, give)

    def checksums(self, action: SendChecksums) -> None:
        """Calls ChecksumBlocks."""
        me = self._host.description

        def give(result: Result) -> None:
            if isinstance(result, KVGrpcError):
                self._host.handle(ChecksumsAnswered(action.name, action.number, result, _again(result)))
                return
            assert isinstance(result, Checksums)
            self._host.handle(ChecksumsAnswered(action.name, action.number, result.by_rank))

        def ask(call: Call) -> ChecksumBlocks:
            blocks = tuple((tuple(enumerate(lists)), layers) for lists, layers in action.blocks)
            return ChecksumBlocks(call, me.engine_id, me.incarnation, action.access_id, blocks)

        self._ask(action.peer, ask, give)

    def post_send(self, action: SendPostSend) -> None:
        """Calls PostSend, without retries."""
        me, asked = self._host.description, action.ask

        def give(result: Result) -> None:
            answer = SendAnswer(asked.source_rank, asked.epoch, asked.sequence)
            if isinstance(result, KVGrpcError):
                answer = replace(answer, error=result.sentence, known=_is_of_the_lead(result))
            else:
                assert isinstance(result, SendUnderWay)
                answer = replace(answer, values=result.values)
            self._host.handle(PostSendAnswered(action.rank, action.peer, answer, action.incarnation))

        def ask(call: Call) -> PostSend:
            return PostSend(call, me.engine_id, me.incarnation, action.access_id, asked)

        timeout_s = self._rng.choice(SEND_TIMEOUTS_S)
        self._ask(action.peer, ask, give, timeout_s, once=True)

    def _ask(self, peer: str, ask: Ask, give: Give, timeout_s: float = RPC_TIMEOUT_S, *, once: bool = False) -> None:
        """Calls a life, and shows it the proof that it has told this one."""
        known = self._host.node.state.peers.lives.get(peer)
        proof = known.shows[0] if known is not None else b""

        def given(result: Result) -> None:
            if isinstance(result, KVGrpcError) and result.reason is Reason.NOT_PROVED:
                self._host.handle(ProofRefused(peer))
            give(result)

        where = self._network.where(peer)
        self._network.rpc(self._host, where, lambda call: ask(replace(call, proof=proof)), given, timeout_s, once=once)

    def register(self, action: SendRegister) -> None:
        """Calls RegisterPush."""

        def give(result: Result) -> None:
            error = result if isinstance(result, KVGrpcError) else None
            life = action.peer
            if isinstance(result, Registered) and result.transfer is not None:  # a transfer id names its life
                incarnation = result.transfer.id.split("-")[1]
                life = f"{life.rpartition('@')[0]}@{incarnation}"
            self._host.handle(RegisterAnswered(action.transfer_id, life, error, isinstance(error, BUSY)))

        def ask(call: Call) -> RegisterPush:
            ids = self._rng.randbytes(16), self._rng.randbytes(16)
            return RegisterPush(call, action.token, action.request_id, *ids)

        self._ask(action.peer, ask, give)

    def renew(self, action: SendRenew) -> None:
        """Calls RenewLeases."""

        def give(result: Result) -> None:
            for i, (transfer_id, _) in enumerate(action.rows):
                self._host.handle(RenewAnswered(transfer_id, _renewal_error(result, i)))

        refs = tuple(LeaseRef(token=token) for _, token in action.rows)
        self._network.rpc(
            self._host,
            self._network.where(action.peer),
            lambda call: RenewLeases(call, refs, for_access=True, reading=action.reading),
            give,
        )

    def renew_keys(self, action: SendRenewKeys) -> None:
        """Calls RenewLeases by transfer keys."""

        def give(result: Result) -> None:
            if isinstance(result, Renewed):
                rows = zip(action.keys, result.rows, strict=True)
                left = tuple((key, left_s) for key, (left_s, reason, _) in rows if reason is None)
                self._host.handle(KeysRenewed(action.peer, left))

        refs = tuple(LeaseRef(key=key) for key in action.keys)
        where = self._network.where(action.peer)
        self._network.rpc(self._host, where, lambda call: RenewLeases(call, refs, action.ttl_s), give)


def _wants_proof(result: object) -> bool:
    return isinstance(result, KVGrpcError) and result.reason is Reason.NOT_PROVED


def _again(result: object) -> bool:
    return isinstance(result, BUSY) or _wants_proof(result)


def _is_of_the_lead(error: KVGrpcError) -> bool:
    """Returns True if the source's lead has certainly refused a send without asking its rank."""
    lost = isinstance(error, Unavailable | DeadlineExceeded | InternalError)
    return not lost and error.reason is not Reason.DATA_PATH_FAILED


def _renewal_error(result: Result, row: int) -> KVGrpcError | None:
    if isinstance(result, KVGrpcError):
        return result
    assert isinstance(result, Renewed)
    reason = result.rows[row][1]
    return None if reason is None else PreconditionFailed(reason, "not renewed")
