"""FleetService: the registry, for callers that have no client of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from typing import TypeVar

from kvgrpc.core.values.content import DIGEST_BYTES, UNIT_TOKENS
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import invalid, note
from kvgrpc.fleet.directory import EngineState
from kvgrpc.fleet.history import EngineRow, Shows
from kvgrpc.fleet.offered import tenant_part
from kvgrpc.fleet.pairing import NoPair, PairRequest, PickedPair
from kvgrpc.service.engine_watchers import BEAT_S
from kvgrpc.service.fleet.entry_messages import ROLES, entry_to_proto
from kvgrpc.service.fleet.reader import FleetReader, FleetReading, PickOutcome
from kvgrpc.service.identity.gate import CALLER
from kvgrpc.service.lead import Answerer
from kvgrpc.service.places import Places
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.service.rpc.pages import page
from kvgrpc.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc
from kvgrpc.wire.values import duration

FLEET_WATCHES_MAX = 1_024
FLEET_WATCHES_OF_CONNECTION_MAX = 64
ROWS_OF_MESSAGE_MAX = 256
"""Maximum number of entries in one message of a watch. An entry has at most about 3 KB."""
CHAIN_UNITS_MAX = 8_192
"""Maximum number of a chain's units that count for a choice: 131,072 tokens."""

_STATES = {
    EngineState.UNPROVEN: fleet_pb2.ENGINE_STATE_UNPROVEN,
    EngineState.HEALTHY: fleet_pb2.ENGINE_STATE_HEALTHY,
    EngineState.FAILED: fleet_pb2.ENGINE_STATE_FAILED,
    EngineState.DRAINING: fleet_pb2.ENGINE_STATE_DRAINING,
    EngineState.OUTLIVED: fleet_pb2.ENGINE_STATE_OUTLIVED,
}


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """Converts a request, asks the reader of the registry, and converts what it knows."""

    def __init__(self, lead: Answerer, reader: FleetReader, limits: Limits) -> None:
        self._lead, self._reader = lead, reader
        each, most = FLEET_WATCHES_OF_CONNECTION_MAX, FLEET_WATCHES_MAX
        self._places = Places("watches of the fleet", each, most, 1.0, own=1, of_tenant=limits.of_tenant(most))

    @unary
    async def ListEngines(self, request: fleet_pb2.ListEnginesRequest, trace: str) -> fleet_pb2.ListEnginesResponse:
        reading = await self._reader.reading()
        found = page(
            self._lead,
            request,
            reading.history.rows(_shows(request.filter)),
            lambda row: (float(row.number), ""),
            lambda row: _engine(reading, row),
        )
        refused = reading.directory.refusals
        reply = fleet_pb2.ListEnginesResponse(
            header=found.header,
            engines=found.rows,
            next_page_token=found.next_page_token,
            revision=_revision(reading),
            refused_entry_count=refused.unreadable + refused.too_many,
        )
        return _dated(reply, reading)

    @streaming
    async def WatchEngines(
        self, request: fleet_pb2.WatchEnginesRequest, trace: str
    ) -> AsyncIterator[fleet_pb2.WatchEnginesResponse]:
        shows = _shows(request.filter)
        with self._places.one(), self._reader.watching():
            reading = await self._reader.reading()
            at = _number(reading, request.after_revision)
            while True:
                changed, begin, at = reading.changed, at, reading.history.revision
                for reply in _news(reading, begin, shows):
                    reply.header.CopyFrom(self._lead.header())
                    yield _dated(reply, reading)
                try:
                    async with asyncio.timeout(BEAT_S):
                        await changed.wait()
                except TimeoutError:
                    pass  # the next message shows that this server lives

    @unary
    async def PickPair(self, request: fleet_pb2.PickPairRequest, trace: str) -> fleet_pb2.PickPairResponse:
        tenant = CALLER.get().tenant or request.tenant
        wanted = PairRequest(
            model=request.model_digest,
            model_name=request.model_name,
            layout=request.layout_digest,
            tenant=tenant,
            chain=_chain(request.chain, tenant) if request.HasField("chain") else (),
            exclude=frozenset(request.excluded_engine_ids),
        )
        reading, found = await self._reader.pick_pair(wanted)
        self._reader.picks[PickOutcome.NONE if isinstance(found, NoPair) else PickOutcome.PAIR] += 1
        reading.look()
        reply = fleet_pb2.PickPairResponse(
            header=self._lead.header(),
            reason=note(found.reason),
            state_counts=[
                fleet_pb2.EngineStateCount(state=_STATES[state], engine_count=count)
                for state, count in sorted(reading.history.counts(CALLER.get().tenant).items())
            ],
        )
        if not isinstance(found, NoPair):
            _show_pair(reply, reading, found, request.chain)
        return _dated(reply, reading)


def _show_pair(
    reply: fleet_pb2.PickPairResponse, reading: FleetReading, pair: PickedPair, chain: common_pb2.ContentChain
) -> None:
    rows = reading.history.by_key()
    for side, one in ((reply.prefill, pair.prefill), (reply.decode, pair.decode)):
        side.engine.CopyFrom(_engine(reading, rows[one.key]))
    for side, units in ((reply.prefill, pair.prefix_units), (reply.decode, pair.decode_units)):
        side.held_token_count = min(units * UNIT_TOKENS, chain.token_count)
    reply.same_host = pair.same_host
    reply.cost.MergeFrom(
        fleet_pb2.PairCost(
            prefill_load=pair.cost.prefill_load,
            decode_load=pair.cost.decode_load,
            computed_share=pair.cost.computed_share,
            distance=pair.cost.distance,
            total=pair.cost.total,
        )
    )


def _shows(wanted: fleet_pb2.EngineFilter) -> Shows:
    """Returns whether the caller of the served call sees a row, and whether the row meets a filter."""
    tenant, states = CALLER.get().tenant, frozenset(wanted.states)
    either = fleet_pb2.ENGINE_ROLE_BOTH

    def shows(row: EngineRow) -> bool:
        entry, role = row.entry, ROLES[row.entry.role]
        return (
            (not tenant or entry.tenant in ("", tenant))
            and (not wanted.engine_id or entry.engine_id == wanted.engine_id)
            and (not wanted.model_name or entry.model_name == wanted.model_name)
            and (not wanted.model_digest or entry.model == wanted.model_digest)
            and (not wanted.role or role in (wanted.role, either))
            and (not states or _STATES[row.state] in states)
        )

    return shows


def _chain(stated: common_pb2.ContentChain, tenant: str) -> list[bytes]:
    """Returns the digests of whole units, which tell the prompts of one tenant from those of another one. Raises
    InvalidRequest.
    """
    digests = stated.digests
    if len(digests) != -(-stated.token_count // UNIT_TOKENS) * DIGEST_BYTES:
        raise invalid("chain.digests", f"has a digest of {DIGEST_BYTES} bytes for each {UNIT_TOKENS} tokens")
    whole = min(stated.token_count // UNIT_TOKENS, CHAIN_UNITS_MAX)
    own = tenant_part(tenant)
    return [own + digests[unit * DIGEST_BYTES : (unit + 1) * DIGEST_BYTES] for unit in range(whole)]


def _news(reading: FleetReading, at: int, shows: Shows) -> Iterator[fleet_pb2.WatchEnginesResponse]:
    """Yields the messages that a watch has to send after a revision: at least one, of which the last is complete. All
    tell of the moment at which the first is taken.
    """
    revision, news = _revision(reading), reading.history.since(at, shows)
    rows = tuple(reading.history.rows(shows)) if news is None else news.rows
    gone = () if news is None else news.gone
    most = max(len(rows), len(gone), 1)
    for begin in range(0, most, ROWS_OF_MESSAGE_MAX):
        end = begin + ROWS_OF_MESSAGE_MAX
        yield fleet_pb2.WatchEnginesResponse(
            snapshot=news is None and not begin,
            engines=[_engine(reading, row) for row in rows[begin:end]],
            removed_entry_ids=map(_entry_id, gone[begin:end]),
            complete=end >= most,
            revision=revision if end >= most else "",
        )


def _revision(reading: FleetReading) -> str:
    return f"{reading.name}-{reading.history.revision}"


def _number(reading: FleetReading, revision: str) -> int:
    """Returns the number of a revision of this reading; -1: it is of another one."""
    name, _, number = revision.partition("-")
    return int(number) if name == reading.name and number.isascii() and number.isdecimal() else -1


def _entry_id(key: str) -> str:
    return sha256(key.encode(errors="replace")).hexdigest()[:32]


def _engine(reading: FleetReading, row: EngineRow) -> fleet_pb2.FleetEngine:
    made, listed = entry_to_proto(row.entry), reading.directory.listed_at(row.key)
    made.entry_id, made.state, made.why = _entry_id(row.key), _STATES[row.state], row.why
    if listed is not None:
        made.load = listed.load
        age = asyncio.get_running_loop().time() - listed.proved_at
        if 0 <= age < float("inf"):
            made.answer_age.CopyFrom(duration(age))
    return made


_Dated = TypeVar("_Dated", fleet_pb2.ListEnginesResponse, fleet_pb2.WatchEnginesResponse, fleet_pb2.PickPairResponse)


def _dated(reply: _Dated, reading: FleetReading) -> _Dated:
    """Returns a reply with how long the registry has been silent."""
    silence = reading.directory.stale_s(asyncio.get_running_loop().time())
    if silence is not None:
        reply.registry_silence.CopyFrom(duration(silence))
    return reply
