"""Engine: the scheduler's view of its lead.

Calls are queued and leave with the next `poll` or `flush`; answers and events come with `poll`. Lease ids and grants
are minted here, from the session's secret, so that a hand-over waits for no answer.

A lead that an engine started for itself (`launch`) is replaced when it dies, in steps within `poll`, which waits for
none of them:

* Every hand-over, pull, reservation and push fails at once: Failed, with ENGINE_LOST. Grants are void, and peers use
  nothing of what they read.
* Blocks come back, with BlocksReturned, when it is proved that nothing accesses them any more. Only the lead moves
  bytes of shared memory: the end of its process is the proof. Workers move bytes of private memory: each ends its
  postings and its data paths before it attaches to the new lead.
* The pool keeps its bytes. `ticket`, `engine_id` and ranks stay; `incarnation` and `address` are new.
* Meanwhile every call to the lead raises Unavailable (ENGINE_LOST). Calls on lost handles do nothing.
* If the replacement fails, or a worker is gone too, calls raise LeadDied, and no event follows. Calls do so at once
  when the engine did not launch the lead (`attach`), or when the pool is SERVER_MANAGED: only the lead knows its
  allocations. Then close the Engine and every Rank, and make new ones.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self

from kvgrpc.core.actions import Reclaimed
from kvgrpc.core.values import grants
from kvgrpc.core.values.content import largest_use
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.layout import PoolKind, PoolLayout
from kvgrpc.core.values.limits import Limits, granted_firm_ttl, granted_ttl
from kvgrpc.core.values.request_times import plausible
from kvgrpc.engine.session.connection import LeadConnection
from kvgrpc.engine.session.launch import LeadProcess
from kvgrpc.engine.session.lead_restart import COMES_BACK_S, attach_again
from kvgrpc.engine.session.sessions import Sessions
from kvgrpc.engine.ticket import RankTicket, ticket_of
from kvgrpc.engine.transfers.events import Event
from kvgrpc.engine.transfers.handles import AnyBlocks, Content, HandOver, Pull, named_blocks
from kvgrpc.engine.transfers.pushes import LayerRange, Push, Reservation, renewal
from kvgrpc.errors import InvalidRequest, Reason
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire.description import POOL_KINDS, pool_from_proto, pool_to_proto
from kvgrpc.wire.frames import encode
from kvgrpc.wire.session import reclaimed_from_proto
from kvgrpc.wire.values import ON_ABORT, duration

RELAUNCHES = 3
"""Default maximum number of leads started anew within a minute."""


class Engine(AbstractContextManager["Engine"]):
    """One engine, attached to its lead, for use by one thread; leaving `with` ends the session."""

    def __init__(self, socket_path: str, request: session_pb2.AttachRequest) -> None:
        """Use `attach` or `launch`."""
        connection = LeadConnection(socket_path)
        answer, page = connection.attach(encode(session_pb2.ClientFrame(attach=request)))
        attached = answer.attached
        self.engine_id = attached.header.engine_id
        self.pool = pool_from_proto(attached.pool, "pool")
        self.ticket = ticket_of(socket_path, attached.rank_ticket, self.pool, request.world_size)
        self._request = request
        self._lead: LeadProcess | None = None
        self._lives = Sessions((connection, attached, page))

    @classmethod
    def attach(  # noqa: PLR0913 - by name, each with a default
        cls,
        socket_path: str,
        *,
        pool: PoolLayout | None = None,
        kind: PoolKind = PoolKind.ENGINE_MANAGED,
        private_memory: bool = False,
        mirrored: bool = False,
        world_size: int = 1,
        weights_revision: str = "",
        engine_id: str = "",
        sets_aside: bool = True,
        expects_pushes: bool = False,
    ) -> Self:
        """Attaches to a running lead. `pool` None takes the lead's configured pool.

        With `private_memory` the workers bring their own memory and move the bytes. `mirrored` is the same with a
        Device for each worker, whose memory no data path reaches. Otherwise the lead makes shared memory for every
        rank. Without `sets_aside` the engine cannot wait long for quarantined blocks. With `expects_pushes` the engine
        calls `take_pushes_wanted` after each poll. See AttachRequest. Raises Unavailable when no lead answers,
        InvalidRequest for the pool, Exhausted (POOL_EXHAUSTED) when it does not fit, AlreadyExists (ENGINE_ATTACHED).
        """
        own = session_pb2.POOL_MEMORY_MIRRORED if mirrored else session_pb2.POOL_MEMORY_PRIVATE
        memory = own if private_memory or mirrored else session_pb2.POOL_MEMORY_SHARED
        request = session_pb2.AttachRequest(
            engine_id=engine_id, kind=POOL_KINDS[kind], pool=pool_to_proto(pool, kind) if pool else None, memory=memory,
            world_size=world_size, weights_revision=weights_revision, cannot_set_aside=not sets_aside,
            expects_pushes=expects_pushes,
        )  # fmt: skip
        return cls(socket_path, request)

    @classmethod
    def launch(
        cls, *, listen: str = "127.0.0.1:0", flags: Sequence[str] = (), relaunches: int = RELAUNCHES, **attach: Any
    ) -> Self:
        """Starts a lead of this engine's own as a child process and attaches to it. The lead ends with the engine.

        A lead that dies is replaced, at most `relaunches` times within a minute; see above. `flags`: further flags of
        `kvgrpc serve`; `attach`: arguments of `attach`. Raises LeadDied when the lead does not start.
        """
        lead = LeadProcess(listen, flags)
        try:
            engine = cls.attach(lead.socket_path, **attach)
        except BaseException:
            lead.stop()
            raise
        engine._survive(lead, relaunches)  # noqa: SLF001 - of this very class
        return engine

    @property
    def incarnation(self) -> int:
        """Incarnation of this life; every lead brings a new one."""
        return self._lives.incarnation

    @property
    def address(self) -> str:
        """Address at which peers reach the lead."""
        return self._lives.address

    @property
    def remote_ticket(self) -> RankTicket:
        """Ticket for workers on other hosts, whose memory is private: `ticket`, with the current lead's address.

        Their hosts must reach that address, so it cannot be loopback. Workers find the next lead only if it has the
        same address: `listen` with a fixed port.
        """
        return replace(self.ticket, address=self.address)

    @property
    def lead_pid(self) -> int:
        """Process id of the lead."""
        return self._lives.lead_pid

    @property
    def lead_gone(self) -> bool:
        """True if the process of a lead of this engine's own has ended: no lead vouches for its blocks any more."""
        return self._lead is not None and self._lead.gone()

    @property
    def limits(self) -> Limits:
        """Limits of the lead."""
        return self._lives.limits

    def finished_blocks(  # noqa: PLR0913 - by name, each with a default
        self,
        blocks: AnyBlocks,
        content: Content,
        *,
        transfer_key: bytes,
        request_id: str = "",
        ttl_s: float | None = None,
        firm_ttl_s: float | None = None,
        consumers: int = 1,
        on_abort: grants.OnAbort = grants.OnAbort.RELEASE,
        after_step: int = 0,
        request_time_us: int = 0,
        takes_registrations: bool = False,
        tenant: str = "",
        bound_to: str = "",
        findable: bool = False,
        traceparent: str = "",
    ) -> HandOver:
        """Hands finished blocks over to readers, without a round trip: the grant is minted here.

        The blocks belong to the hand-over until BlocksReturned: its readers are done, `ttl_s` is over, or `reclaim`
        takes them back after `firm_ttl_s`, if no reader has come. `request_time_us`: when the request began, in µs
        since the Unix epoch; 0 is now. With `takes_registrations` the blocks are pushed to a destination that registers
        under the key before a reader comes; with `findable` FindOffers finds them. The grant is for consumers of
        `tenant`, or for the one named `bound_to`. Refusals arrive as Failed and BlocksReturned; errors that can be seen
        here raise InvalidRequest or OutOfRange.
        """
        check_transfer_key(transfer_key)
        ttl_s = granted_ttl(ttl_s, self.limits)
        began_us = plausible(request_time_us, time.time_ns() // 1000)
        granted_firm_ttl(firm_ttl_s, self.limits)
        key, own, lease = self._lives.present().grant_key, named_blocks(blocks, self.incarnation), self._lives.mint()
        claims = grants.Claims(
            access=grants.AccessKind.READ, engine_id=self.engine_id, incarnation=self.incarnation, address=self.address,
            lease_id=lease, transfer_key=transfer_key, ttl_s=ttl_s, token_count=content.tokens, on_abort=on_abort,
            block_count=sum(sum(row.runs.counts) for row in own.groups), request_time_us=began_us, tenant=tenant,
            bound_to=bound_to,
        )  # fmt: skip
        job = handoff_pb2.HandOver(
            blocks=own, content=content.message, ttl=duration(ttl_s), consumer_count=consumers, after_step=after_step,
            on_abort=ON_ABORT[on_abort], lease_id=lease, request_time_us=began_us, tenant=tenant, bound_to=bound_to,
            firm_ttl=None if firm_ttl_s is None else duration(firm_ttl_s), takes_registrations=takes_registrations,
            findable=findable,
        )  # fmt: skip
        request = handoff_pb2.FinishedBlocksRequest(transfer_key=transfer_key, request_id=request_id, for_readers=job)
        page, token = self._lives.page, grants.mint(claims, key)
        made = HandOver(ask=self._lives.ask, request_id=request_id, grant=token, lease_id=lease, page=page)
        self._lives.ask(made, traceparent, finished_blocks=request, void_slot=page.take(lease))
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
        request_time_us: int = 0,
        allow_prefix: bool = False,
        traceparent: str = "",
    ) -> Pull:
        """Pulls what a grant offers: holds and renews its lease from now on; `Pull.start` gives the blocks.
        `request_time_us`: when the request that takes the offer began; 0: when the request that handed over began.
        `allow_prefix`: as the field of PullBlocks; Received says how many tokens came. Until the pull has blocks, the
        source may take the offer back for an older request: Failed, with LEASE_RECLAIMED. Raises InvalidRequest
        (GRANT_INVALID) for a token that is no grant; other refusals arrive as Failed.
        """
        offer_tokens = grants.read_claims(grant).token_count
        request = handoff_pb2.PullBlocksRequest(
            grant=common_pb2.Grant(token=grant), content=content.message, transfer_key=transfer_key,
            request_id=request_id, use_tokens=use_tokens, priority=priority, request_time_us=request_time_us,
            allow_prefix=allow_prefix,
        )  # fmt: skip
        usable = use_tokens or largest_use(content.tokens, offer_tokens)
        pull = Pull(ask=self._lives.ask, request_id=request_id, use_tokens=usable, incarnation=self.incarnation)
        self._lives.present().ask_for(pull, traceparent, pull_blocks=request)
        return pull

    def reserve(  # noqa: PLR0913 - by name, each with a default
        self,
        blocks: AnyBlocks,
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
        allow_prefix: bool = False,
        traceparent: str = "",
    ) -> Reservation:
        """Reserves blocks that a push will fill: from the first one that is not wholly held (`have_tokens`), or in
        which a window begins, to the one with the last of `use_tokens`.

        With `source_address` the lead registers the push there by itself; otherwise `Reservation.grant`, which Reserved
        announces, must reach the source. Refusals by the lead arrive as Failed and BlocksReturned.
        """
        check_transfer_key(transfer_key)
        request = handoff_pb2.ReserveBlocksRequest(
            transfer_key=transfer_key, request_id=request_id, blocks=named_blocks(blocks, self.incarnation),
            have_tokens=have_tokens, content=content.message, use_tokens=use_tokens, after_step=after_step,
            priority=priority, allow_prefix=allow_prefix,
        )  # fmt: skip
        if source_address:
            request.source.address, request.source.engine_id = source_address, source_engine_id
        reservation = Reservation(ask=self._lives.ask, request_id=request_id, use_tokens=use_tokens or content.tokens)
        self._lives.ask(reservation, traceparent, reserve_blocks=request)
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
        firm_ttl_s: float | None = None,
        traceparent: str = "",
    ) -> Push:
        """Begins the source's side of a push to `consumers` engines; `Push.finished` hands its parts over."""
        check_transfer_key(transfer_key)
        granted_firm_ttl(firm_ttl_s, self.limits)
        return Push(
            ask=self._lives.ask, page=self._lives.page, mint=self._lives.mint, consumers=consumers, on_abort=on_abort,
            request_id=request_id, transfer_key=transfer_key, content=content, priority=priority,
            firm_ttl_s=firm_ttl_s, incarnation=self.incarnation, traceparent=traceparent,
        )  # fmt: skip

    def cancel(self, transfer_key: bytes, message: str = "") -> None:
        """Cancels everything under a key, now and later. For one transfer use its handle's `cancel`."""
        request = transfer_pb2.CancelTransferRequest(transfer_key=transfer_key, message=message)
        self._lives.ask(None, cancel_transfer=request)

    def renew_keys(self, address: str, keys: Sequence[bytes], engine_id: str = "") -> None:
        """Asks the lead at `address`, once, to keep what it pushes or will push under these keys. Repeat it in time."""
        self._lives.ask(None, renew_leases=renewal(address, keys, engine_id))

    def step_done(self, step: int, layers: LayerRange | None = None) -> None:
        """Reports that all work of steps up to `step` is done, or their work on `layers`. For engines whose only rank
        is in this process and does not report steps.

        Raises InvalidRequest for an engine with several ranks.
        """
        if self._request.world_size > 1:
            raise InvalidRequest(Reason.INVALID_FIELD, "each of several ranks reports its own steps: Rank.step_done")
        self._lives.step_done(step, layers)

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Allocates blocks of a SERVER_MANAGED pool for the life of the session; waits for the answer.

        Raises Exhausted (POOL_EXHAUSTED) when there are too few, PreconditionFailed (POOL_KIND_MISMATCH).
        """
        counts = [pool_pb2.GroupBlockCount(group=group, block_count=count)]
        answer = self._lives.wait(allocate_blocks=pool_pb2.AllocateBlocksRequest(group_block_counts=counts))
        runs = answer.allocate_blocks.blocks.groups[0].runs
        return [start + i for start, n in zip(runs.starts, runs.counts, strict=True) for i in range(n)]

    def free(self, blocks: AnyBlocks) -> None:
        """Frees blocks of a SERVER_MANAGED pool; waits for the answer. Pinned blocks become free at their last unpin.

        Raises PreconditionFailed (BLOCK_NOT_ALLOCATED), and then frees none.
        """
        self._lives.wait(free_blocks=pool_pb2.FreeBlocksRequest(blocks=named_blocks(blocks, self.incarnation)))

    def reclaim(self, count: int, group: int = 0, *, request_time_us: int = 0, request_id: str = "",
                timeout_s: float | None = None) -> Reclaimed:  # fmt: skip
        """Takes `count` blocks back, all or none, from hand-overs that nobody claimed in their firm time; waits for the
        answer. Failed (LEASE_RECLAIMED) and BlocksReturned of these hand-overs come with the next `poll`.

        `request_time_us`, `request_id`: the oldest request that waits for blocks. Hand-overs whose readers are younger
        and have no blocks yield to it; 0: none yield. An engine that hands over and takes always states both, or two of
        them may wait for each other until the leases end. `timeout_s`: see `Session.wait`. Raises InvalidRequest,
        OutOfRange for more than the pool has, Unavailable between leads, DeadlineExceeded.
        """
        request = pool_pb2.ReclaimBlocksRequest(request_time_us=request_time_us, request_id=request_id)
        request.group_block_counts.add(group=group, block_count=count)
        answer = self._lives.wait(timeout_s, reclaim_blocks=request).reclaim_blocks
        return reclaimed_from_proto(answer.reclaimed, len(self.pool.groups))

    def call(self, traceparent: str = "", **request: Any) -> int:
        """Queues any call of the session, by its field there, and returns its number. `poll` sends it, and brings its
        `answer`. For engines whose lead is not replaced: with a SERVER_MANAGED pool, or attached.
        """
        return self._lives.present().begin(traceparent, **request)

    def answered(self, number: int) -> bool:
        """Returns whether a call has an answer."""
        return self._lives.answered(number)

    def answer(self, number: int) -> session_pb2.CallAnswer:
        """Returns the answer to a call that has one, once. Raises the error that refused the call."""
        return self._lives.answer(number)

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Sends queued calls and returns events, waiting up to `timeout_s` for the first one.

        The next frame tells the lead that these events were read. While a lead is being replaced, `poll` does what can
        be done at once. Raises LeadDied when the lead is gone for good.
        """
        return self._lives.poll(timeout_s)

    def take_pushes_wanted(self) -> list[bytes]:
        """Returns keys, each once, under which destinations wait for parts still to come; see `Push.expect`."""
        return self._lives.take_pushes_wanted()

    def flush(self) -> None:
        """Sends queued calls. Raises LeadDied."""
        self._lives.flush()

    def due(self) -> bool:
        """Returns whether `poll` has something to do: news came, or a lead is being replaced. Takes a microsecond."""
        return self._lives.due()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` has something to do. It is the same for all leads."""
        return self._lives.fileno()

    def close(self) -> None:
        """Ends the session, and with it every lease and transfer of this engine. Idempotent."""
        self._lives.close()
        if self._lead is not None:
            self._lead.stop()

    def abandon(self) -> None:
        """Closes at once: a lead of the engine's own is killed, and vouches for nothing when this returns."""
        if self._lead is not None:
            self._lead.kill()
        self.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _survive(self, lead: LeadProcess, relaunches: int) -> None:
        """Has the engine's own lead replaced when it dies, unless it alone knows who has which blocks."""
        self._lead = lead
        relaunches *= self._request.kind != POOL_KINDS[PoolKind.SERVER_MANAGED]
        again = attach_again(self._request, self.engine_id, self.ticket, self.pool)
        self._lives.survive(lead, again, relaunches)
        if relaunches:
            self.ticket = replace(self.ticket, comes_back_s=COMES_BACK_S)
