"""The manager of one scheduler of SGLang: its share of the pool, and, in the first of them, the engine."""

import hashlib
import json
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base import BaseKVBootstrapServer, BaseKVManager, KVArgs
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_parallel

from kvgrpc.engine import BlocksReturned, Content, Engine, Event, Failed, LeadDied, Rank, RankTicket, Received, content
from kvgrpc.errors import KVGrpcError, NextStep, Reason
from kvgrpc.integrations import across
from kvgrpc.integrations.derived_keys import room_key
from kvgrpc.integrations.sglang.geometry import Heads, memory_of, unserved
from kvgrpc.integrations.sglang.settings import Settings

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.server_args import ServerArgs

    from kvgrpc.engine.transfers.handles import Handle

_log = logging.getLogger(__name__)

AWAITED = 1024
"""Maximum number of keys that are remembered until their request arrives."""

IDLE_S = 0.002
"""Time that a step without a batch waits for news, in seconds; requests come at every step."""


class Owner(Protocol):
    """A sender or receiver, which hears of its transfer."""

    def hear(self, event: Event) -> None: ...


class WantedSender(Protocol):
    """A sender, which hears that decode has registered."""

    def wanted(self) -> None: ...


class AbortedReceiver(Protocol):
    """A receiver, whose request can be ended."""

    def abort(self) -> None: ...


@dataclass(frozen=True)
class PrefillInfo:
    """Number of replicas of a prefill engine, for which SGLang's decode asks before it sends it a request."""

    dp_size: int = 1
    follow_bootstrap_room: bool = True


class KVManager(BaseKVManager):
    """Everything that outlives a request, for SGLang's scheduler thread alone.

    `engine` is None on all attention-TP ranks but the first, whose answers decide for all: SGLang takes the least
    advanced of the ranks' polls. The others report what they have computed, and say nothing else.
    """

    supports_deferred_decode_kv_release = True

    def __init__(
        self, args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: "ServerArgs",
        is_mla_backend: bool | None = False,
    ) -> None:  # fmt: skip
        """Starts the lead, or attaches to the first rank's.

        Raises ValueError for an engine that this back end does not serve, and what `Engine.launch` and `Rank` raise.
        """
        _check(server_args)
        self.kv_args = args
        prefills = disaggregation_mode == DisaggregationMode.PREFILL
        port = get_disagg().disaggregation_bootstrap_port if prefills else 0
        self._settings = Settings.read(server_args, port)
        self.prefill_info_table: dict[str, PrefillInfo] = {}
        self.enable_deferred_decode_kv_release = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
        self.across = self._settings.across_engines
        model = ModelConfig.from_server_args(server_args)
        model_dtype = str(model.dtype).removeprefix("torch.")
        self._memory = memory_of(args, model_dtype, None if is_mla_backend else _heads(model), across=self.across)
        self._identity = _identity(self._settings, server_args, model)
        self._states = len(self._memory.layout.groups) - 2
        self._owners: dict[Handle, Owner] = {}
        self._untold: deque[tuple[Owner, Event]] = deque()
        """Events that their owners have not heard; an owner that raises leaves those of others here."""
        self._holding: dict[int, Owner] = {}
        """Receivers by room whose pages SGLang holds until they are proved to be at rest."""
        self._expecting: dict[bytes, WantedSender] = {}
        self._awaited: dict[bytes, None] = {}
        """Keys under which decode has registered and no request has arrived; only the latest are kept."""
        self._step = 0
        self.engine, ticket = self._meet(f"sglang {server_args.disaggregation_mode}")
        self._alone = get_parallel().attn_tp_size == 1
        rank = get_parallel().attn_tp_rank
        self._rank = Rank(ticket, rank, self._memory.arrays, data_paths=self._settings.data_paths)

    def _meet(self, what: str) -> tuple[Engine | None, RankTicket]:
        """Starts the lead in the first rank, and returns the engine there, with the ticket for each rank."""
        parallel = get_parallel()
        engine = None
        if parallel.attn_tp_rank == 0:
            engine = Engine.launch(
                listen=self._settings.listen, pool=self._memory.layout, private_memory=True,
                flags=("--data-paths", ",".join(self._settings.data_paths), *self._settings.serve_flags),
                world_size=parallel.attn_tp_size, weights_revision=self._identity, expects_pushes=True,
            )  # fmt: skip
            _log.info("kvgrpc: %s, engine %s, serves at %s", what, engine.engine_id, engine.address)
        found = [engine.ticket if engine is not None else None]
        if parallel.attn_tp_size > 1:
            group = parallel.attn_tp_group
            torch.distributed.broadcast_object_list(found, src=group.ranks[0], group=group.cpu_group)
        ticket = found[0]
        assert ticket is not None, "the first rank has it"
        return engine, ticket

    # -- what SGLang asks

    def register_to_bootstrap(self) -> None:
        """Does nothing: the lead serves at the bootstrap address."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Returns True: leads tell each other what the engines are like, and refuse what does not fit."""
        self.prefill_info_table.setdefault(bootstrap_addr, PrefillInfo())
        return True

    def submit_prefill_recompute(self, receiver: AbortedReceiver, _: object) -> None:
        """Ends a request whose prompt SGLang would prefill anew after a change of weights: this back end does not ask
        for it.
        """
        receiver.abort()

    def is_abort_release_safe(self, room: int, _: int) -> bool:
        """Returns whether nothing can write any more to the pages of a request that failed."""
        self.hear()
        return room not in self._holding

    def clear_deferred_abort_state(self, room: int) -> None:
        self._holding.pop(room, None)

    # -- what senders and receivers ask

    def key_of(self, room: int) -> bytes:
        """Returns the transfer key of a request, which both engines make of the room that the router chose."""
        return room_key(self._settings.pairing_secret, room)

    def content_of(self, req: "Req | None", room: int, pages: int) -> Content:
        """Returns what the KV of a request's prompt is of. Without a request, which only a test does not have, it is of
        the room.
        """
        if req is None:
            name = hashlib.sha256(b"sglang_room:%d" % room).digest()
            return content(opaque_id=name, tokens=pages * self.kv_args.page_size)
        return content(req.origin_input_ids, adapter=req.lora_id or "", cache_salt=req.extra_key or "")

    def blocks_of(self, pages: Any, row: int | None, states: Sequence[Any] | None) -> list[list[int]]:
        """Returns the blocks of each group. `row`: that of aux; None: only pages."""
        if row is None or self.across:
            return [list(map(int, pages))]
        found = [list(map(int, pages)), [row]]
        found += [list(map(int, of)) for of in (states or [])[: self._states]]
        return found

    def next_step(self) -> int:
        """Reports that all that this rank has computed is there, and returns the number of that step. Every rank sends
        and receives in the same order, so all of them mean the same step. A rank that is alone reports nothing, and
        returns 0: the call that follows says as much.
        """
        if self._alone:
            return 0
        self._step += 1
        try:
            self._rank.step_done(self._step)
        except LeadDied as error:
            _log.warning("kvgrpc: the session of this rank is over: %s", error)
        return self._step

    def own(self, handle: "Handle", owner: Owner) -> None:
        """Sends a transfer's calls; its events go to the owner from now on."""
        self._owners[handle] = owner
        self.flush()

    def hold(self, room: int, owner: Owner) -> None:
        """Notes that a request's pages are not at rest."""
        self._holding[room] = owner

    def at_rest(self, room: int, owner: Owner) -> None:
        """Notes that nothing can write to a request's pages any more."""
        if self._holding.get(room) is owner:
            del self._holding[room]

    def takes_nothing(self, source: str, room: int, of: Content) -> None:
        """Registers a request of which this engine needs nothing any more. Prefill then computes it and is done: it
        does not wait for a registration that never comes.
        """
        self._reserve_none(source, room, of)

    def let_go(self, source: str, room: int, why: str) -> None:
        """Tells the lead at `source` that this engine failed to take a request and does not come again. It is asked for
        and cancelled at once, so that the source hears only of the cancel.
        """
        self._reserve_none(source, room, content(opaque_id=b"unknown", tokens=1), cancelled=why)

    def gives_nothing(self, key: bytes, why: str) -> None:
        """Tells decode, which would wait for its timeout, that the lead refused the first part under this key."""
        if self.engine is None:
            return
        try:
            self.engine.push(content(opaque_id=b"unknown", tokens=1), transfer_key=key).fail(why)
        except KVGrpcError as error:
            _log.warning("kvgrpc: decode is not told about a refused part: %s", error)
        self.flush()

    def _reserve_none(self, source: str, room: int, of: Content, cancelled: str = "") -> None:
        if self.engine is None:
            return
        try:
            self.engine.reserve(
                (), of, transfer_key=self.key_of(room), have_tokens=of.tokens, use_tokens=of.tokens,
                source_address=source,
            )  # fmt: skip
            if cancelled:
                self.engine.cancel(self.key_of(room), cancelled)
        except KVGrpcError as error:
            _log.warning("kvgrpc: prefill is not told about room %d: %s", room, error)
        self.flush()

    def expect(self, key: bytes, sender: WantedSender) -> None:
        """Tells the sender once decode has registered under the key."""
        self._expecting[key] = sender
        if key in self._awaited:
            del self._awaited[key]
            self._expecting.pop(key).wanted()

    def expect_no_more(self, key: bytes) -> None:
        self._expecting.pop(key, None)

    def flush(self) -> None:
        """Sends queued calls; a lead that is gone is reported by `hear`."""
        if self.engine is None:
            return
        try:
            self.engine.flush()
        except KVGrpcError as error:
            _log.warning("kvgrpc: %s", error)

    def hear(self, timeout_s: float = 0.0) -> None:
        """Takes what is there of news, waiting up to `timeout_s` for the first."""
        if self.engine is None or not (timeout_s or self._untold or self.engine.due()):
            return
        try:
            events = self.engine.poll(timeout_s)
        except LeadDied as error:
            events = []
            self._over(str(error))
        for event in events:
            last = isinstance(event, Received | BlocksReturned)
            owner = self._owners.pop(event.transfer, None) if last else self._owners.get(event.transfer)
            if owner is not None:
                self._untold.append((owner, event))
        while self._untold:
            owner, event = self._untold.popleft()
            owner.hear(event)
        for key in self.engine.take_pushes_wanted():
            sender = self._expecting.pop(key, None)
            if sender is not None:
                sender.wanted()
            else:
                self._awaited[key] = None
                if len(self._awaited) > AWAITED:
                    del self._awaited[next(iter(self._awaited))]

    def wait(self) -> None:
        """Waits for news, for a moment, if there may be some. A dead lead is news without a request too: peers reach
        this engine only through the next one.
        """
        if self._owners or self._expecting or (self.engine is not None and self.engine.due()):
            self.hear(IDLE_S)

    def _over(self, message: str) -> None:
        """Fails every transfer of a lead that is gone for good. Pages that peers may write stay held."""
        owners, self._owners = self._owners, {}
        for handle, owner in owners.items():
            self._untold.append((owner, Failed(handle, Reason.ENGINE_LOST, message, NextStep.RECOMPUTE)))


def _heads(model: ModelConfig) -> Heads:
    ranks = get_parallel().attn_tp_size
    per_rank = model.get_num_kv_heads(ranks)
    total = per_rank * ranks if per_rank > 1 else min(ranks, model.get_total_num_kv_heads())
    return Heads(per_rank, total, model.head_dim)


def _identity(settings: Settings, args: "ServerArgs", model: ModelConfig) -> str:
    """Returns the name of what KV is of here."""
    if not settings.across_engines:
        return settings.weights_revision
    stated = across.stated_config(args.model_path, args.revision)
    return across.identity_of(
        settings.weights_revision, stated, json.loads(args.json_model_override_args or "{}"),
        quantization=model.quantization or "", model_len=model.context_len,
    )  # fmt: skip


def _check(args: "ServerArgs") -> None:
    """Raises ValueError for an engine that this back end does not serve."""
    parallel = get_parallel()
    if args.device != "cpu":
        raise unserved(f"caches in host memory so far; this one is on {args.device}", "another back end")
    for name in ("pp_size", "dp_size", "attn_cp_size"):
        if getattr(parallel, name) != 1:
            raise unserved(f"engines whose {name} is 1", "tensor-parallel ranks alone")


class NoBootstrapServer(BaseKVBootstrapServer):
    """Stands where SGLang expects a server, in the process of its HTTP server. The lead serves at that address."""

    def __init__(self, host: str, port: int) -> None:
        pass

    def close(self) -> None:
        pass
