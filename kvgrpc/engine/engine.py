"""Engine: the scheduler's view of its lead.

Calls are queued and leave with the next `poll` or `flush`; answers and events come with `poll`. Lease ids and grants
are minted here, from the session's secret, so that handing over waits for nobody.

When the lead dies, every call raises LeadDied, once. What is then true:

* Leases, grants and transfers are over, at both ends: peers find the incarnation gone and use nothing of it.
* Shared memory was moved by the lead alone. Once its process is gone (`close` waits for a lead of one's own) nothing
  writes into it any more, and what the workers mapped stays theirs to read.
* Private memory is moved by the workers. A rank's blocks are at rest when its `Rank.close` has returned.

The seam for a replacement is `close` on this object and on every Rank, then a new `Engine` (`launch` starts a new
lead) and new Ranks on the new ticket: a new incarnation, which knows of no hand-over or pull of the old one. The
engine computes or pulls again what it was waiting for; references that it keeps per hand-over or pull are its own to
drop then, since no BlocksReturned comes for them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from kvgrpc.core import grants
from kvgrpc.core.content import largest_use
from kvgrpc.core.ids import mint_lease_id
from kvgrpc.core.layout import PoolKind, PoolLayout
from kvgrpc.core.limits import granted_ttl
from kvgrpc.engine.connection import Connection, LeadDied
from kvgrpc.engine.events import BlocksReturned, Event, Received
from kvgrpc.engine.handles import BlockIds, Content, Handle, HandOver, Pull, check_key, group_blocks
from kvgrpc.engine.launch import LeadProcess
from kvgrpc.engine.outbox import Outbox
from kvgrpc.engine.pushes import LayerRange, Push, Reservation
from kvgrpc.engine.ticket import RankTicket
from kvgrpc.engine.transfers import Transfers
from kvgrpc.engine.void_page import VoidPage
from kvgrpc.errors import DeadlineExceeded, InvalidRequest, KVGrpcError, Reason
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire.description import POOL_KINDS, limits_from_proto, pool_from_proto, pool_to_proto
from kvgrpc.wire.frames import encode
from kvgrpc.wire.session import step_report
from kvgrpc.wire.values import ON_ABORT, duration, stated_error

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
_T = TypeVar("_T")


class Engine:
    """One engine, attached to its lead. Use from one thread; `with` ends the session."""

    def __init__(self, connection: Connection, socket_path: str, attach: session_pb2.AttachRequest) -> None:
        """Use `attach` or `launch`."""
        self._connection = connection
        answer, page = connection.attach(encode(session_pb2.ClientFrame(attach=attach)))
        attached = answer.attached
        self.engine_id = attached.header.engine_id
        self.incarnation = attached.header.incarnation
        self.address = attached.address
        self.pool = pool_from_proto(attached.pool, "pool")
        self.limits = limits_from_proto(attached.limits)
        self.ticket = RankTicket(socket_path, attached.rank_ticket, self.pool.total_bytes)
        self._secret = attached.session_secret
        self._grant_key = grants.signing_key(self._secret)
        self._world_size = max(attach.world_size, 1)
        self._lead: LeadProcess | None = None
        self._leases, self._outbox = 0, Outbox()
        self._page = VoidPage(page, attached.void_slots)
        self._transfers = Transfers(self._page)
        self._answers: dict[int, session_pb2.CallAnswer | None] = {}
        """Of calls that somebody waits for."""
        self._abandoned: set[int] = set()
        """Calls whose answer came too late for whoever waited."""
        self._unsent: list[Pull] = []
        self._events: list[Event] = []
        # Numbers of the last event that was read, that `poll` has returned, and that the lead knows to be returned.
        self._read_event = self._returned_event = self._acknowledged_event = 0

    @classmethod
    def attach(  # noqa: PLR0913 - by name, each with a default
        cls,
        socket_path: str,
        *,
        pool: PoolLayout | None = None,
        kind: PoolKind = PoolKind.ENGINE_MANAGED,
        private_memory: bool = False,
        world_size: int = 1,
        weights_revision: str = "",
        engine_id: str = "",
        sets_aside: bool = True,
    ) -> Self:
        """Attaches to a running lead. `pool` None takes the lead's configured one.

        With `private_memory` the workers bring their own memory and move the bytes; else the lead makes shared memory
        for every rank. Not `sets_aside`: the engine cannot wait for blocks in quarantine for long, see the session's
        AttachRequest. Raises Unavailable when no lead answers, or what the lead refuses it with: AlreadyExists
        (ENGINE_ATTACHED), InvalidRequest for the pool, Exhausted (POOL_EXHAUSTED) when it does not fit.
        """
        memory = session_pb2.POOL_MEMORY_PRIVATE if private_memory else session_pb2.POOL_MEMORY_SHARED
        request = session_pb2.AttachRequest(
            engine_id=engine_id, kind=POOL_KINDS[kind], pool=pool_to_proto(pool, kind) if pool else None, memory=memory,
            world_size=world_size, weights_revision=weights_revision, cannot_set_aside=not sets_aside,
        )  # fmt: skip
        connection = Connection(socket_path)
        try:
            return cls(connection, socket_path, request)
        except KVGrpcError:
            connection.close()
            raise

    @classmethod
    def launch(cls, *, listen: str = "127.0.0.1:0", flags: Sequence[str] = (), **attach: Any) -> Self:
        """Starts a lead of this engine's own as a child process and attaches to it. The lead ends with the engine.

        `flags` are further flags of `kvgrpc serve`; `attach` as in `attach`. Raises LeadDied when it does not start.
        """
        lead = LeadProcess(["--listen", listen, *flags])
        try:
            engine = cls.attach(lead.socket_path, **attach)
        except BaseException:
            lead.stop()
            raise
        engine._lead = lead  # noqa: SLF001 - of this very class
        return engine

    # -- what a scheduler does

    def finished_blocks(  # noqa: PLR0913 - by name, each with a default
        self,
        blocks: BlockIds,
        content: Content,
        *,
        transfer_key: bytes,
        request_id: str = "",
        ttl_s: float | None = None,
        consumers: int = 1,
        on_abort: grants.OnAbort = grants.OnAbort.RELEASE,
        after_step: int = 0,
        traceparent: str = "",
    ) -> HandOver:
        """Hands finished blocks over to readers. No round trip: the grant is minted here.

        The blocks belong to the hand-over until BlocksReturned. What the lead refuses arrives as Failed and
        BlocksReturned; what can be seen to be wrong here raises InvalidRequest or OutOfRange.
        """
        check_key(transfer_key)
        ttl_s = granted_ttl(ttl_s, self.limits)
        rows, lease_id = group_blocks(blocks), self._mint()
        claims = grants.Claims(
            access=grants.Access.READ,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            address=self.address,
            lease_id=lease_id,
            transfer_key=transfer_key,
            ttl_s=ttl_s,
            block_count=sum(sum(row.blocks.counts) for row in rows),
            token_count=content.tokens,
            on_abort=on_abort,
        )
        token = grants.mint(claims, self._grant_key)
        request = handoff_pb2.FinishedBlocksRequest(
            transfer_key=transfer_key,
            request_id=request_id,
            blocks=rows,
            content=content.message,
            ttl=duration(ttl_s),
            consumers=consumers,
            on_abort=ON_ABORT[on_abort],
            waits_for=handoff_pb2.WAITS_FOR_READERS,
            last=True,
            after_step=after_step,
            lease_id=lease_id,
        )
        made = HandOver(ask=self._ask, request_id=request_id, grant=token, lease_id=lease_id, page=self._page)
        self._ask(made, traceparent, finished_blocks=request, void_slot=made.page.take(lease_id))
        return made

    def pull(  # noqa: PLR0913 - by name, each with a default
        self,
        grant: bytes,
        content: Content,
        *,
        transfer_key: bytes = b"",
        request_id: str = "",
        use_tokens: int = 0,
        priority: int = 0,
        traceparent: str = "",
    ) -> Pull:
        """Pulls what a grant offers: holds and renews it from now on; `Pull.start` gives the blocks.

        Raises InvalidRequest (GRANT_INVALID) for what is no grant; everything else arrives as Failed.
        """
        offer_tokens = grants.read_claims(grant).token_count
        request = handoff_pb2.PullBlocksRequest(
            grant=common_pb2.Grant(token=grant),
            content=content.message,
            transfer_key=transfer_key,
            request_id=request_id,
            use_tokens=use_tokens,
            priority=priority,
        )
        usable = use_tokens or largest_use(content.tokens, offer_tokens)
        pull = Pull(ask=self._ask, request_id=request_id, use_tokens=usable)
        pull.unsent = self._ask(pull, traceparent, pull_blocks=request).pull_blocks
        self._unsent.append(pull)
        return pull

    def reserve(  # noqa: PLR0913 - by name, each with a default
        self,
        blocks: BlockIds,
        content: Content,
        *,
        transfer_key: bytes,
        have_tokens: int = 0,
        use_tokens: int = 0,
        source_address: str = "",
        source_engine_id: str = "",
        request_id: str = "",
        priority: int = 0,
        after_step: int = 0,
        traceparent: str = "",
    ) -> Reservation:
        """Reserves blocks that a push will fill: from the first that is not wholly held (`have_tokens`) to the one of
        the last of `use_tokens`.

        With `source_address` the lead registers the push there by itself; else `Reservation.grant`, which Reserved
        announces, must reach the source. What the lead refuses arrives as Failed and BlocksReturned.
        """
        check_key(transfer_key)
        request = handoff_pb2.ReserveBlocksRequest(
            transfer_key=transfer_key, request_id=request_id, blocks=group_blocks(blocks), have_tokens=have_tokens,
            content=content.message, use_tokens=use_tokens, after_step=after_step, priority=priority,
        )  # fmt: skip
        if source_address:
            request.source.address, request.source.engine_id = source_address, source_engine_id
        reservation = Reservation(ask=self._ask, request_id=request_id, use_tokens=use_tokens or content.tokens)
        self._ask(reservation, traceparent, reserve_blocks=request)
        return reservation

    def push(  # noqa: PLR0913 - by name, each with a default
        self,
        content: Content,
        *,
        transfer_key: bytes,
        consumers: int = 1,
        on_abort: grants.OnAbort = grants.OnAbort.RELEASE,
        request_id: str = "",
        priority: int = 0,
        traceparent: str = "",
    ) -> Push:
        """The source's side of a push to `consumers` engines: `Push.finished` hands its parts over as they come."""
        check_key(transfer_key)
        return Push(
            ask=self._ask, page=self._page, mint=self._mint, consumers=consumers, on_abort=on_abort,
            request_id=request_id, transfer_key=transfer_key, content=content, priority=priority,
            traceparent=traceparent,
        )  # fmt: skip

    def cancel(self, transfer_key: bytes, message: str = "") -> None:
        """Cancels everything under a key, also what is still to come: for one transfer, use its handle's `cancel`."""
        request = transfer_pb2.CancelTransferRequest(transfer_key=transfer_key, message=message)
        self._ask(None, cancel_transfer=request)

    def step_done(self, step: int, layers: LayerRange | None = None) -> None:
        """All work of steps up to `step` is done, or that of these layers; for engines whose only rank is in this
        process, and reports none.

        Raises InvalidRequest for an engine with several ranks.
        """
        if self._world_size != 1:
            raise InvalidRequest(Reason.INVALID_FIELD, "each of several ranks reports its own steps: Rank.step_done")
        self._outbox.add_silent(step_done=step_report(step, layers))

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Takes blocks of a SERVER_MANAGED pool; waits for the answer.

        Raises Exhausted (POOL_EXHAUSTED) when there are too few, PreconditionFailed (POOL_KIND_MISMATCH).
        """
        request = pool_pb2.AllocateBlocksRequest(counts=[pool_pb2.GroupCount(group=group, count=count)])
        answer = self._wait(allocate_blocks=request)
        runs = answer.allocate_blocks.blocks[0].blocks
        return [start + i for start, n in zip(runs.starts, runs.counts, strict=True) for i in range(n)]

    def free(self, blocks: BlockIds) -> None:
        """Gives blocks of a SERVER_MANAGED pool back; waits for the answer. Pinned ones come free at their last unpin.

        Raises PreconditionFailed (BLOCK_NOT_ALLOCATED), and then none is given back.
        """
        self._wait(free_blocks=pool_pb2.FreeBlocksRequest(blocks=group_blocks(blocks)))

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Sends what is queued and returns what happened, waiting up to `timeout_s` for the first event.

        What is sent next tells the lead that these events were read. Raises LeadDied when the lead is gone.
        """
        self.flush()
        deadline = time.monotonic() + timeout_s
        while not self._events and self._read(deadline - time.monotonic()):
            pass
        events, self._events = self._events, []
        self._returned_event = self._read_event
        for event in events:
            if isinstance(event, Received | BlocksReturned):
                event.transfer.over = True
        return events

    def flush(self) -> None:
        """Sends what is queued. Raises LeadDied."""
        if not self._outbox and self._acknowledged_event == self._returned_event:
            return
        for pull in self._unsent:
            pull.unsent = None
        self._unsent.clear()
        for frame in self._outbox.take(self._returned_event):
            self._guard(partial(self._connection.send, frame))
        self._acknowledged_event = self._returned_event

    def fileno(self) -> int:
        """Readable when `poll` has something; for an event loop of the engine's own."""
        return self._connection.fileno()

    def close(self) -> None:
        """Ends the session, and with it every lease and transfer of this engine. Idempotent."""
        self._connection.close()
        self._page.close()
        if self._lead is not None:
            self._lead.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the session

    def _ask(self, handle: Handle | None, traceparent: str = "", **request: Any) -> session_pb2.Call:
        call = self._outbox.add(traceparent, **request)
        if handle is not None:
            self._transfers.asked(call.call_id, handle)
        return call

    def _mint(self) -> str:
        self._leases += 1
        return mint_lease_id(self._secret, self.incarnation, "engine", self._leases)

    def _wait(self, **request: Any) -> session_pb2.CallAnswer:
        """Makes one call and waits for its answer; events that come meanwhile are kept for `poll`."""
        call_id = self._ask(None, **request).call_id
        self._answers[call_id] = None
        self.flush()
        deadline = time.monotonic() + CALL_TIMEOUT_S
        try:
            while (answer := self._answers[call_id]) is None:
                if not self._read(deadline - time.monotonic()):
                    self._abandoned.add(call_id)
                    what = f"the lead did not answer within {CALL_TIMEOUT_S:g} s"
                    raise DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": "session"})
        finally:
            del self._answers[call_id]
        if answer.HasField("failure"):
            raise stated_error(answer.code, answer.failure.reason, answer.failure.message)
        return answer

    def _read(self, timeout_s: float) -> bool:
        """Takes in what is there and sends what was waiting for it; False when nothing came."""
        frames = self._guard(partial(self._connection.receive, timeout_s))
        for frame in frames:
            for event in frame.events.events:
                self._read_event = event.event_id
                if event.HasField("answer"):
                    self._take_answer(event.answer)
                self._events += self._transfers.take(event)
        self.flush()
        return bool(frames)

    def _take_answer(self, answer: session_pb2.CallAnswer) -> None:
        if answer.call_id in self._answers:
            self._answers[answer.call_id] = answer
        elif answer.call_id in self._abandoned:
            self._abandoned.discard(answer.call_id)
            if answer.HasField("allocate_blocks"):
                given = pool_pb2.FreeBlocksRequest(blocks=answer.allocate_blocks.blocks)
                self._ask(None, free_blocks=given)
        elif not answer.call_id:
            _log.error("the lead refused what is answered only then: %s", answer.failure.message)

    def _guard(self, work: Callable[[], _T]) -> _T:
        """Does it; adds to LeadDied what a lead of this engine's own said last."""
        try:
            return work()
        except LeadDied as error:
            said = self._lead.last_words() if self._lead is not None else ""
            raise LeadDied(Reason.PEER_LOST, error.message + (f": {said}" if said else "")) from error
