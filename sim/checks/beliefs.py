"""Checks what a lead may believe of its peers, some of which lie: who owns an access, and which answers are plausible.

A liar may vouch for wrong bytes, and that cannot be detected. But nothing may be accepted that the lead's own checks
could have refused: an answer that does not fit the request, bytes without a verdict, and a delivery of other content,
by another life, or of an epoch no later than the last one. No peer may settle, close, widen or ask checksums of an
access that is not its own, or use a grant that this lead has not signed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvgrpc.core.actions import (
    Answer,
    Checksums,
    Closings,
    Openings,
    Operation,
    Post,
    Released,
    Renewed,
    SendChecksums,
    SendOpen,
    Verdicts,
)
from kvgrpc.core.events import (
    AccessAnswered,
    AccessSettling,
    ChecksumBlocks,
    ChecksumsAnswered,
    CloseAccess,
    Event,
    OpenAccess,
    Opened,
    PartsReady,
    ReleaseLease,
    RenewLeases,
    ReserveBlocks,
    SettleAccess,
    SettleAnswered,
)
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.content import ContentClaim, check, claim
from kvgrpc.core.values.grants import read_claims, verify
from kvgrpc.core.values.ids import peer_key
from kvgrpc.errors import KVGrpcError, Reason
from sim.checks.compared import Compared
from sim.rules import Rule, broken
from sim.world.memory import Memory

Layers = tuple[LayerRange, ...]
Lies = Callable[[str], bool]
"""Returns True if a life of a peer is a liar's."""
PeerRequest = OpenAccess | SettleAccess | CloseAccess | PartsReady | ChecksumBlocks


class Beliefs:
    """The beliefs of one lead in one life of its process, seen through `state`."""

    def __init__(self, state: NodeState, lies: Lies) -> None:
        self._state = state
        self._lies = lies
        self._owner: dict[bytes, str] = {}
        """Life that opened an access here, or for which it was opened, by access."""
        self._asked: dict[bytes, SendOpen] = {}
        self._reads: dict[str, bytes] = {}
        """Access under which a transfer's blocks are filled, by transfer."""
        self._writes: dict[tuple[str, str], list[bytes]] = {}
        """Accesses under which this side fills blocks at a destination, by transfer and destination."""
        self._opened: set[bytes] = set()
        self._unsound: dict[bytes, str] = {}
        """Accesses whose issuer's answer is not plausible, with the reason."""
        self._concluded: set[bytes] = set()
        """Accesses that were settled for the last time."""
        self._vouched: set[bytes] = set()
        """Concluded accesses that their issuer then called valid. This lead may be the issuer."""
        self._moves_itself: set[str] = set()
        """Transfers whose bytes this side reads."""
        self._delivered: dict[str, tuple[str, int, bytes]] = {}
        """Life, epoch and access of the current delivery, by transfer."""
        self._compared = Compared()
        self._wanted: dict[str, ContentClaim] = {}
        """Content wanted of a delivery, by transfer."""

    def asks(self, action: SendOpen) -> None:
        """Takes note that the lead asks a peer for an access."""
        opening = action.opening
        self._asked[opening.access_id] = action
        if opening.push_content is None:
            self._reads[opening.transfer_id] = opening.access_id
            self._moves_itself.add(opening.transfer_id)
        elif opening.reverse_access_id:
            self._owner[opening.reverse_access_id] = action.peer
        else:
            self._writes.setdefault((opening.transfer_id, action.peer), []).append(opening.access_id)

    def settles(self, settling: AccessSettling) -> None:
        """Takes note that the lead asks a peer for a verdict."""
        if settling.last:
            self._concluded.add(settling.access_id)
        for transfer_id in self._compared.moving():
            if self._reads.get(transfer_id) == settling.access_id:
                self._compared.settles(transfer_id)

    def compares(self, action: SendChecksums) -> None:
        """Takes note that the lead asks a peer for checksums."""
        peer = self._state.peers.lives.get(action.peer)
        if peer is not None:
            self._compared.asks(action, peer.description.pool)

    def hears(self, event: Event) -> None:
        """Takes note of a peer's request or answer."""
        if isinstance(event, OpenAccess):
            for opening in event.openings:
                if opening.access_id not in self._state.access.rows:  # a forgotten id may be used again
                    self._owner.pop(opening.access_id, None)
                    self._vouched.discard(opening.access_id)
        elif isinstance(event, AccessAnswered) and isinstance(event.result, Opened):
            asked = self._asked.get(event.access_id)
            if asked is not None and event.access_id not in self._opened:
                self._opened.add(event.access_id)
                flaw = self._flaw(asked, event.result)
                if flaw:
                    self._unsound[event.access_id] = flaw
        elif isinstance(event, ChecksumsAnswered):
            self._compared.hears(event)
        elif isinstance(event, SettleAnswered) and isinstance(event.result, Verdict) and event.result.valid:
            self._vouched.update({event.access_id} & self._concluded)

    def posts(self, action: Post) -> None:
        """Checks that a posting's access has a plausible answer."""
        if action.operation is Operation.READ:
            if self._state.moves.checksums and self._lies(action.peer):
                self._compared.posts(action)
            accesses = [self._reads.get(action.transfer_id, b"")]
        else:
            accesses = self._writes.get((action.transfer_id, action.peer), [b""])
        flaws = [self._unsound[id_] for id_ in accesses if id_ in self._unsound]
        if len(flaws) == len(accesses):
            broken(Rule.R2, f"{action.transfer_id} moves bytes although {flaws[0]}", action.transfer_id)

    def succeeds(self, transfer: Transfer, waiting: Iterable[Event]) -> None:
        """Checks a transfer from a liar that succeeds. `waiting` are unanswered calls."""
        access_id = self._reads.get(transfer.id, b"")
        if access_id in self._unsound:
            broken(Rule.R2, f"{transfer.id} succeeds although {self._unsound[access_id]}", transfer.id)
        # An access of a call with several rows is open before the call is answered.
        rows = [row for event in waiting if isinstance(event, OpenAccess) for row in event.openings]
        opened = {row.reverse_access_id or row.access_id for row in rows}
        if self._vouched.isdisjoint(opened | {access_id}):
            broken(Rule.R2, f"{transfer.id} succeeds, and no side said that it is valid", transfer.id)

    def check_arrived(self, transfer_id: str, blocks: Blocks, memories: list[Memory], layers: Layers) -> None:
        """Checks KV of some layers from a liar that is used. What this side reads must be there; if it compares
        checksums, it must match the other side's sums.
        """
        if transfer_id in self._moves_itself:
            for memory in memories:
                memory.check_filled(blocks, transfer_id, layers)
            self._compared.check(transfer_id, memories)

    def wants(self, transfer_id: str, event: ReserveBlocks) -> None:
        """Takes note of the content of a reservation."""
        assert event.content is not None
        self._wanted.setdefault(transfer_id, claim(event.content, event.content.tokens, event.use_tokens))

    def replied(self, event: Event, answer: Answer) -> None:
        """Checks the lead's answer to a call that it did not refuse."""
        if isinstance(event, OpenAccess) and isinstance(answer, Openings):
            self._granted(event, answer)
        elif isinstance(event, SettleAccess) and isinstance(answer, Verdicts):
            valid = [row.valid for row in answer.rows]
            ids = [row.access_id for row in event.settlings]
            self._check_owned(event, ids, valid, "settles")
            last = [row.last for row in event.settlings]
            self._vouched.update(id_ for id_, *all_right in zip(ids, last, valid, strict=True) if all(all_right))
        elif isinstance(event, CloseAccess) and isinstance(answer, Closings):
            self._check_owned(event, [row.access_id for row in event.closings], answer.rows, "closes")
        elif isinstance(event, PartsReady):
            self._check_owned(event, [event.access_id], [True], "widens")
        elif isinstance(event, ChecksumBlocks) and isinstance(answer, Checksums):
            self._check_owned(event, [event.access_id], [True], "sums up what is read under")
        elif isinstance(event, RenewLeases) and isinstance(answer, Renewed) and event.source is None:
            for ref, (_, refused, _) in zip(event.leases, answer.rows, strict=True):
                if refused is None and ref.token:
                    self._check_signed(ref.token)
        elif isinstance(event, ReleaseLease) and isinstance(answer, Released) and event.lease.token:
            self._check_signed(event.lease.token)

    def life_began(self) -> None:
        """Forgets the last life: the new one has granted and asked for nothing."""
        tables: Sequence[Any] = (
            self._owner, self._asked, self._reads, self._writes, self._opened, self._unsound, self._concluded,
            self._vouched, self._moves_itself, self._delivered, self._wanted,
        )  # fmt: skip
        for table in tables:
            table.clear()
        self._compared.life_began()

    def fills(self, event: AccessAnswered) -> str:
        """Returns the transfer that a destination says is filled, or "" for a liar, which names any."""
        asked, opened = self._asked.get(event.access_id), event.result
        assert isinstance(opened, Opened)
        return "" if asked is None or self._lies(asked.peer) else opened.transfer_id

    def _granted(self, event: OpenAccess, answer: Openings) -> None:
        life = peer_key(event.engine_id, event.incarnation)
        for opening, row in zip(event.openings, answer.rows, strict=True):
            if isinstance(row, Opened) or row.reason in (Reason.LEASE_NOT_FOUND, Reason.TRANSFER_ENDED):
                self._check_signed(opening.token)  # the grant was looked up
            if not isinstance(row, Opened):
                continue
            self._owner.setdefault(opening.access_id, life)
            if opening.push_content is not None:
                self._check_delivery(row.transfer_id, life, opening.access_id)
        opened = [isinstance(row, Opened) for row in answer.rows]
        self._check_owned(event, [row.access_id for row in event.openings], opened, "opens")

    def _check_delivery(self, transfer_id: str, life: str, access_id: bytes) -> None:
        """Checks a push's delivery: it is by one life, in a higher epoch each time it starts over, and of the wanted
        content.
        """
        opening = self._state.access.rows[access_id].opening
        known = self._delivered.get(transfer_id)
        if known is not None and known[2] == access_id:
            return
        if known is not None and (known[0] != life or known[1] >= opening.part_epoch):
            epoch = opening.part_epoch
            message = f"{life} delivers {transfer_id} in epoch {epoch} after {known[0]} did in epoch {known[1]}"
            broken(Rule.R2, message, transfer_id)
        if known is not None:
            self._compared.forget(transfer_id)
        self._delivered[transfer_id] = life, opening.part_epoch, access_id
        reads = self._reads[transfer_id] = opening.reverse_access_id or access_id
        self._unsound.pop(reads, None)  # the id may have been one of this lead's, long ago
        (self._moves_itself.add if opening.reverse_access_id else self._moves_itself.discard)(transfer_id)
        assert opening.push_content is not None
        try:
            check(opening.push_content, self._wanted[transfer_id])
        except KVGrpcError as error:
            broken(Rule.R11, f"{life} delivers {transfer_id}, and that is of other content: {error}", transfer_id)

    def _check_owned(self, event: PeerRequest, ids: Sequence[bytes], done: Sequence[bool], what: str) -> None:
        life = peer_key(event.engine_id, event.incarnation)
        peer = self._state.peers.lives.get(life)
        for access_id in [id_ for id_, yes in zip(ids, done, strict=True) if yes]:
            name, known = f"a-{access_id.hex()}", self._state.access.rows.get(access_id)
            owner = self._owner.get(access_id, "" if known is None else known.peer)
            if owner != life:
                broken(Rule.R2, f"{life} {what} {name}, which is of {owner}", name)
            waited = isinstance(event, ChecksumBlocks)  # the peer may have died since it asked
            if not waited and (peer is None or peer.state is PeerState.DEAD):
                broken(Rule.R2, f"{life} {what} {name}, and was declared dead", name)

    def _check_signed(self, token: bytes) -> None:
        me = self._state.life.description
        assert me is not None
        try:
            verify(token, self._state.life.grant_key, me.engine_id, me.incarnation, read_claims(token).access)
        except KVGrpcError as error:
            broken(Rule.R2, f"a grant is taken for good, and is not: {error}")

    def _flaw(self, asked: SendOpen, opened: Opened) -> str:
        """Returns the flaw of a peer's answer that its asker can detect by itself, or ""."""
        peer = self._state.peers.lives.get(asked.peer)
        transfer = self._state.transfers.find(asked.opening.transfer_id)
        if peer is None or transfer is None:
            return ""
        content, wanted = asked.opening.push_content, transfer.use_tokens
        if content is None:
            if opened.token_count != wanted:
                return f"{opened.token_count} tokens were granted, and {wanted} asked for"
            if not (opened.ttl_s > 0 and opened.remaining_s >= 0):
                return "its lease is over"
        elif not 0 < opened.token_count <= content.tokens:
            return f"{opened.token_count} tokens are taken of {content.tokens}"
        if opened.memory_generation != peer.description.memory_generation:
            return "the peer's memory is of another generation"
        return _flaw_of_blocks(opened, peer.description, exact=content is None)


def _flaw_of_blocks(opened: Opened, peer: EngineDescription, *, exact: bool) -> str:
    groups = peer.pool.groups
    if [group for group, _ in opened.blocks] != list(range(len(groups))):
        return "not every group is listed once"
    for i, ids in opened.blocks:
        listed, needed = ids.tolist(), groups[i].blocks_of(opened.token_count)
        if len(listed) > needed or (exact and len(listed) < needed):
            return f"group {i} has {len(listed)} blocks where {needed} are needed"
        if len(set(listed)) != len(listed) or any(not 0 <= block < groups[i].blocks for block in listed):
            return f"group {i} lists a block twice, or one that does not exist"
    for shared in peer.pool.shared_spaces:
        every = [block for i in shared for block in opened.blocks[i][1].tolist()]
        if len(set(every)) != len(every):
            return f"groups {shared} of one space list the same block"
    return ""
