"""Engine: the scheduler's view of its lead.

Calls are queued and leave with the next `poll` or `flush`; answers and events come with `poll`. Lease ids and grants
are minted here, from the session's secret, so that handing over waits for nobody.
"""

from collections.abc import Sequence
from typing import Any, Self

from kvgrpc.core import grants
from kvgrpc.core.ids import mint_lease_id
from kvgrpc.core.layout import PoolKind, PoolLayout
from kvgrpc.core.limits import granted_ttl
from kvgrpc.core.transfers import Next
from kvgrpc.engine.connection import Connection
from kvgrpc.engine.events import BlocksReturned, Event, Failed, PullOpened, Received
from kvgrpc.engine.handles import BlockIds, Content, HandOver, Pull, group_blocks, usable_tokens
from kvgrpc.engine.launch import LeadDied, LeadProcess
from kvgrpc.engine.ticket import RankTicket
from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire.description import POOL_KINDS, limits_from_proto, pool_from_proto, pool_to_proto
from kvgrpc.wire.values import core_reason, duration

CALL_TIMEOUT_S = 10.0
_NEXT = {
    common_pb2.NEXT_STEP_RETRY_HERE: Next.RETRY_HERE,
    common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER: Next.RETRY_OTHER_CONSUMER,
    common_pb2.NEXT_STEP_FIX_REQUEST: Next.FIX_REQUEST,
}


class Engine:
    """One engine, attached to its lead. Use from one thread; `with` ends the session."""

    def __init__(self, connection: Connection, socket_path: str, attach: session_pb2.AttachRequest) -> None:
        """Use `attach` or `launch`."""
        self._connection = connection
        answer, _ = connection.attach(session_pb2.ClientFrame(attach=attach))
        attached = answer.attached
        self.engine_id = attached.header.engine_id
        self.incarnation = attached.header.incarnation
        self.address = attached.address
        self.ticket = RankTicket(socket_path, attached.rank_ticket)
        self.pool = pool_from_proto(attached.pool, "pool")
        self.limits = limits_from_proto(attached.limits)
        self._secret = attached.session_secret
        self._grant_key = grants.signing_key(self._secret)
        self._lead: LeadProcess | None = None
        self._leases = 0
        self._last_call = 0
        self._read_events = 0
        self._calls: list[session_pb2.Call] = []
        self._asked: dict[int, Pull | HandOver | None] = {}
        self._answers: dict[int, session_pb2.CallAnswer] = {}
        self._transfers: dict[str, Pull | HandOver] = {}
        self._events: list[Event] = []

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
    ) -> Self:
        """Attaches to a running lead. `pool` None takes the lead's configured one.

        With `private_memory` the workers bring their own memory and move the bytes; else the lead makes shared memory
        for every rank. Raises Unavailable, or PreconditionFailed with the lead's refusal.
        """
        request = session_pb2.AttachRequest(
            engine_id=engine_id,
            kind=POOL_KINDS[kind],
            pool=pool_to_proto(pool, kind) if pool else None,
            memory=session_pb2.POOL_MEMORY_PRIVATE if private_memory else session_pb2.POOL_MEMORY_SHARED,
            world_size=world_size,
            weights_revision=weights_revision,
        )
        connection = Connection(socket_path)
        try:
            return cls(connection, socket_path, request)
        except KVGrpcError:
            connection.close()
            raise

    @classmethod
    def launch(cls, *, listen: str = "127.0.0.1:0", flags: Sequence[str] = (), **attach: Any) -> Self:
        """Starts a lead of this engine's own as a child process and attaches to it.

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
        BlocksReturned.
        """
        ttl_s = granted_ttl(ttl_s, self.limits)
        self._leases += 1
        lease_id = mint_lease_id(self._secret, self.incarnation, "engine", self._leases)
        rows = group_blocks(blocks)
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
        handover = HandOver(grants.mint(claims, self._grant_key), lease_id, request_id)
        request = handoff_pb2.FinishedBlocksRequest(
            transfer_key=transfer_key,
            request_id=request_id,
            blocks=rows,
            content=content.message,
            ttl=duration(ttl_s),
            consumers=consumers,
            on_abort=common_pb2.ON_ABORT_KEEP if on_abort is grants.OnAbort.KEEP else common_pb2.ON_ABORT_RELEASE,
            waits_for=handoff_pb2.WAITS_FOR_READERS,
            last=True,
            after_step=after_step,
            lease_id=lease_id,
        )
        self._queue(handover, traceparent, finished_blocks=request)
        return handover

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
        pull = Pull(
            request, self._give, self._cancel, usable_tokens(content.tokens, offer_tokens, use_tokens), request_id
        )
        self._queue(pull, traceparent, pull_blocks=request)
        return pull

    def cancel(self, transfer_key: bytes, message: str = "") -> None:
        """Cancels everything under a key, also what is still to come."""
        request = transfer_pb2.CancelTransferRequest(transfer_key=transfer_key, message=message)
        self._queue(None, "", cancel_transfer=request)

    def step_done(self, step: int) -> None:
        """All work of steps up to `step` is done; for engines whose only rank is in this process."""
        self._calls.append(session_pb2.Call(step_done=rank_pb2.StepReport(step=step)))

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Takes blocks of a SERVER_MANAGED pool; waits for the answer. Raises Exhausted when there are too few."""
        request = pool_pb2.AllocateBlocksRequest(counts=[pool_pb2.GroupCount(group=group, count=count)])
        answer = self._wait(self._queue(None, "", allocate_blocks=request))
        runs = answer.allocate_blocks.blocks[0].blocks
        return [start + i for start, n in zip(runs.starts, runs.counts, strict=True) for i in range(n)]

    def free(self, blocks: BlockIds) -> None:
        """Gives blocks of a SERVER_MANAGED pool back; waits for the answer."""
        self._wait(self._queue(None, "", free_blocks=pool_pb2.FreeBlocksRequest(blocks=group_blocks(blocks))))

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Sends what is queued and returns what happened, waiting up to `timeout_s` for the first event.

        Returning events acknowledges those of the poll before. Raises LeadDied when the lead is gone.
        """
        self.flush()
        if not self._events:
            self._read(timeout_s)
        events, self._events = self._events, []
        return events

    def flush(self) -> None:
        """Sends what is queued."""
        if not self._calls:
            return
        calls, self._calls = self._calls, []
        for call in calls:
            handle = self._asked.get(call.call_id)
            if isinstance(handle, Pull):
                handle.sent = True
                if call.pull_blocks.HasField("grant"):
                    call.pull_blocks.CopyFrom(handle.request)
        batch = session_pb2.CallBatch(calls=calls, read_events=self._read_events)
        self._guard(lambda: self._connection.send(session_pb2.ClientFrame(calls=batch)))

    def fileno(self) -> int:
        """Readable when `poll` has something; for an event loop of the engine's own."""
        return self._connection.fileno()

    def close(self) -> None:
        """Ends the session, and with it every lease and transfer of this engine. Idempotent."""
        self._connection.close()
        if self._lead is not None:
            self._lead.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the session

    def _queue(self, handle: Pull | HandOver | None, traceparent: str, **request: Any) -> int:
        self._last_call += 1
        self._calls.append(session_pb2.Call(call_id=self._last_call, traceparent=traceparent, **request))
        self._asked[self._last_call] = handle
        return self._last_call

    def _give(self, request: handoff_pb2.PullBlocksRequest, pull: Pull) -> None:
        self._queue(pull, "", pull_blocks=request)

    def _cancel(self, pull: Pull, message: str) -> None:
        if pull.transfer_id:
            request = transfer_pb2.CancelTransferRequest(transfer_id=pull.transfer_id, message=message)
        else:
            key = grants.read_claims(pull.request.grant.token).transfer_key
            request = transfer_pb2.CancelTransferRequest(transfer_key=key, message=message)
        self._queue(None, "", cancel_transfer=request)

    def _wait(self, call_id: int) -> session_pb2.CallAnswer:
        """Waits for one answer; events that come meanwhile are kept for `poll`."""
        self.flush()
        self._answers[call_id] = session_pb2.CallAnswer()
        while not self._answers[call_id].call_id:
            if not self._read(CALL_TIMEOUT_S):
                raise Unavailable(Reason.DEADLINE, "the lead did not answer in time")
        answer = self._answers.pop(call_id)
        if answer.HasField("failure"):
            raise KVGrpcError(core_reason(answer.failure.reason), answer.failure.message)
        return answer

    def _read(self, timeout_s: float) -> bool:
        """Takes in what is there; False when nothing came."""
        frames = self._guard(lambda: self._connection.receive(timeout_s))
        for frame in frames:
            for event in frame.events.events:
                self._read_events = event.event_id
                self._take(event)
        return bool(frames)

    def _guard(self, work: Any) -> Any:
        try:
            return work()
        except Unavailable as error:
            said = f": {self._lead.said()}" if self._lead and self._lead.exit_code() is not None else ""
            raise LeadDied(Reason.PEER_LOST, error.message + said) from error

    def _take(self, event: session_pb2.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "answer":
            self._take_answer(event.answer)
            return
        if kind is None:
            return
        row = getattr(event, kind)
        handle = self._transfers.get(row.transfer_id)
        if handle is None:
            return
        if kind == "opened" and isinstance(handle, Pull):
            self._events.append(PullOpened(handle, row.use_tokens))
        elif kind == "received" and isinstance(handle, Pull):
            self._end(handle)
            self._events.append(Received(handle, row.use_tokens))
        elif kind == "failed":
            self._fail(handle, row.failure, cancelled=row.cancelled)
        elif kind == "blocks_returned":
            self._end(handle)
            self._events.append(BlocksReturned(handle))

    def _take_answer(self, answer: session_pb2.CallAnswer) -> None:
        handle = self._asked.pop(answer.call_id, None)
        if answer.call_id in self._answers:
            self._answers[answer.call_id] = answer
        if handle is None:
            return
        if answer.HasField("failure"):
            if not handle.transfer_id:
                self._fail(handle, answer.failure)
                self._end(handle)
                self._events.append(BlocksReturned(handle))
            else:
                self._fail(handle, answer.failure)
            return
        if handle.transfer_id:
            return
        transfer = getattr(answer, answer.WhichOneof("response") or "pull_blocks").transfer
        handle.transfer_id = transfer.transfer_id
        self._transfers[handle.transfer_id] = handle
        if isinstance(handle, Pull):
            for request in handle.waiting:
                request.transfer_id = handle.transfer_id
                self._give(request, handle)
            handle.waiting.clear()

    def _fail(self, handle: Pull | HandOver, failure: common_pb2.Failure, *, cancelled: bool = False) -> None:
        next_step = _NEXT.get(failure.next, Next.RECOMPUTE)
        self._events.append(Failed(handle, core_reason(failure.reason), failure.message, next_step, cancelled))

    def _end(self, handle: Pull | HandOver) -> None:
        handle.over = True
        self._transfers.pop(handle.transfer_id, None)
