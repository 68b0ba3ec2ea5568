"""The choice of a pair: one engine to compute a prompt, and one to decode.

Both have the same model and the same layout, serve the tenant, and are healthy. Of all such pairs the one with the
least cost is chosen. The cost of a pair is the load of both, plus the share of the prompt that the first engine has to
compute, plus `REMOTE_COST` times the share that the second one lacks, if the two are on different hosts.

An engine holds what its lead offers, and what it was picked for before. Either may be wrong.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from kvgrpc.fleet.directory import EngineState, ListedEngine
from kvgrpc.fleet.entry import EngineEntry, EngineRole
from kvgrpc.fleet.history import EngineHistory, EngineRow
from kvgrpc.fleet.offered import OfferedPrefixes
from kvgrpc.fleet.prefixes import PrefixIndex

REMOTE_COST = 0.25
"""Cost of moving a whole prompt between two hosts, as a load."""
HOLDERS_TRIED = 8
"""Number of decode engines that are tried because they hold a part of the prompt, beside the idlest ones."""
PICK_COST = 0.02
"""Load that a pick adds to an engine until the engine's own load is told."""
PICK_FADE_S = 2.0
"""Time after which a pick no longer counts, in seconds."""


@dataclass(frozen=True)
class PairRequest:
    """Needs of a request."""

    model: str = ""
    """Digest of the model; empty: any."""
    model_name: str = ""
    """Name of the model; empty: any."""
    layout: str = ""
    """Digest of the layout; empty: any."""
    tenant: str = ""
    chain: Sequence[bytes] = ()
    """Digests of the prompt's units; empty: prefixes do not count."""
    exclude: frozenset[str] = frozenset()
    """Engine ids that are not to be chosen, for a request that is tried again."""


@dataclass(frozen=True)
class PickCost:
    """The parts of a pair's cost, as loads."""

    prefill_load: float
    decode_load: float
    computed_share: float
    """Share of the prompt that the prefill engine has to compute; 0 if the request has no chain."""
    distance: float
    """`REMOTE_COST` times the share of the prompt that the decode engine lacks; 0 on one host."""

    @property
    def total(self) -> float:
        return self.prefill_load + self.decode_load + self.computed_share + self.distance


@dataclass(frozen=True)
class PickedPair:
    """The chosen engines, and why."""

    prefill: ListedEngine
    decode: ListedEngine
    cost: PickCost
    prefix_units: int
    """First units of the prompt that the prefill engine is believed to hold."""
    decode_units: int
    """First units of the prompt that the decode engine is believed to hold."""
    same_host: bool
    reason: str


@dataclass(frozen=True)
class NoPair:
    """No pair fits; `reason` counts what was in the way."""

    reason: str


class _HeldUnits:
    """First units of a prompt that engines are believed to hold."""

    def __init__(self, units: int, offered: dict[str, int], picked: dict[str, int]) -> None:
        """`units` of the prompt are 0 if prefixes do not count. The others are by engine id."""
        self.units, self._offered = units, offered
        self.most = picked | offered
        for engine_id in picked.keys() & offered.keys():
            self.most[engine_id] = max(picked[engine_id], offered[engine_id])

    def of(self, one: ListedEngine) -> int:
        return self.most.get(one.entry.engine_id, 0)

    def lacked(self, one: ListedEngine) -> float:
        """Returns the share of the prompt that an engine lacks; 0 if prefixes do not count."""
        return 1.0 - self.of(one) / self.units if self.units else 0.0

    def distance(self, one: ListedEngine) -> float:
        """Returns what it costs to move the prompt to an engine from another host."""
        return REMOTE_COST * self.lacked(one) if self.units else REMOTE_COST

    def holders(self, engines: dict[str, ListedEngine]) -> list[ListedEngine]:
        """Returns the engines that hold most of the prompt, some of those that hold any."""
        found = [engines[engine_id] for engine_id in self.most if engine_id in engines]
        return sorted(found, key=self.of, reverse=True)[:HOLDERS_TRIED]

    def said(self, one: ListedEngine) -> str:
        """Returns what of the prompt an engine holds, for people; empty if prefixes do not count."""
        if not self.units:
            return ""
        units, offered = self.of(one), self._offered.get(one.entry.engine_id, 0)
        why = "" if not units else " by offers of its lead" if offered == units else " by earlier picks"
        return f", {units} of {self.units} units held{why}"


@dataclass
class _Compatible:
    """Healthy engines with one model and one layout, by the keys of their entries."""

    prefill: dict[str, ListedEngine] = field(default_factory=dict)
    decode: dict[str, ListedEngine] = field(default_factory=dict)
    decode_of: dict[str, dict[str, ListedEngine]] = field(default_factory=dict)
    """The decode engines of each host."""
    decode_by_id: dict[str, ListedEngine] = field(default_factory=dict)

    def add(self, row: EngineRow) -> None:
        if row.entry.role is not EngineRole.DECODE:
            self.prefill[row.key] = row.listed
        if row.entry.role is not EngineRole.PREFILL:
            self.decode[row.key] = self.decode_by_id[row.entry.engine_id] = row.listed
            self.decode_of.setdefault(row.entry.host, {})[row.key] = row.listed

    def remove(self, row: EngineRow) -> None:
        self.prefill.pop(row.key, None)
        if self.decode.pop(row.key, None) is not None:
            beside = self.decode_of[row.entry.host]
            del beside[row.key]
            if not beside:
                del self.decode_of[row.entry.host]
            self.decode_by_id.pop(row.entry.engine_id, None)


class PairPicker:
    """Chooses pairs of the engines that a history has. It keeps the healthy ones by model and layout."""

    def __init__(self, history: EngineHistory, prefixes: PrefixIndex | None = None) -> None:
        self.prefixes = prefixes or PrefixIndex()
        """Prefixes that engines were picked for."""
        self.offers = OfferedPrefixes()
        self._history, self._directory = history, history.directory
        self._classes: dict[tuple[str, str, str], _Compatible] = {}
        self._rows: dict[str, EngineRow] = {}
        """Rows of the engines in the classes."""
        self._seen = 0

    def pick_pair(self, request: PairRequest, now: float) -> PickedPair | NoPair:
        """Returns the pair with the least cost, or why there is none."""
        self._look(now)
        chain = request.chain
        held = _HeldUnits(len(chain), self.offers.units_held(chain), self.prefixes.units_held(chain))
        best: tuple[float, ListedEngine, ListedEngine] | None = None
        for of, engines in self._classes.items():
            if not _wanted(of, request):
                continue
            found = _cheapest(engines, request, held, now)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is None:
            return NoPair(self._why_none(request, now))
        _, prefill, decode = best
        together = _together(prefill, decode)
        distance = 0.0 if together else held.distance(decode)
        cost = PickCost(_load(prefill, now), _load(decode, now), held.lacked(prefill), distance)
        _add_pick(prefill, now)
        _add_pick(decode, now)
        units = held.of(prefill), held.of(decode)
        return PickedPair(prefill, decode, cost, *units, together, _reason(best, held))

    def pick_alone(self, request: PairRequest, now: float) -> ListedEngine | None:
        """Returns the idlest engine that can compute and decode a request by itself; None if there is none."""
        self._look(now)
        fits = [engines.decode.values() for of, engines in self._classes.items() if _wanted(of, request)]
        idlest = min((row for side in fits for row in _two_idlest(side, request, now)), default=None, key=itemgetter(0))
        if idlest is None:
            return None
        _add_pick(idlest[1], now)
        return idlest[1]

    def _look(self, now: float) -> None:
        """Sorts the engines that have changed by model and layout."""
        self._history.look(now)
        if self._seen == self._history.revision:
            return
        news, self._seen = self._history.since(self._seen, lambda _: True), self._history.revision
        gone, rows = (list(self._rows), self._history.by_key().values()) if news is None else (news.gone, news.rows)
        for key in (*gone, *(row.key for row in rows)):
            self._remove(key)
        for row in rows:
            if row.state is EngineState.HEALTHY:
                self._rows[row.key] = row
                self._classes.setdefault(_class_of(row.entry), _Compatible()).add(row)

    def _remove(self, key: str) -> None:
        row = self._rows.pop(key, None)
        if row is None:
            return
        of = _class_of(row.entry)
        self._classes[of].remove(row)
        if not self._classes[of].prefill and not self._classes[of].decode:
            del self._classes[of]

    def _why_none(self, request: PairRequest, now: float) -> str:
        """Returns a line that counts the engines of the request's tenant by state, and those that fit by side."""
        states = Counter(self._directory.state(one, now).value for one in self._directory if _of_tenant(one, request))
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        fitting = [self._classes[of] for of in sorted(self._classes) if _wanted(of, request)]
        classes = [
            c for c in fitting if any(_of_tenant(one, request) for one in (*c.prefill.values(), *c.decode.values()))
        ]
        sides = "; ".join(
            " and ".join(
                f"{sum(_may_serve(one, request) for one in side.values())} {name}"
                for side, name in ((c.prefill, "prefill"), (c.decode, "decode"))
            )
            for c in classes[:4]
        )
        wanted = "".join(f" {name}" for name in (request.model_name, request.model, request.layout) if name)
        return (
            f"no pair{' of' * bool(wanted)}{wanted} for tenant {request.tenant!r}: engines: {counts or 'none'}; "
            f"compatible: {sides or 'none'}"
        )


def _class_of(entry: EngineEntry) -> tuple[str, str, str]:
    return entry.model_name, entry.model, entry.layout


def _wanted(of: tuple[str, str, str], request: PairRequest) -> bool:
    """Returns whether engines of a name, a model and a layout fit a request."""
    asked = request.model_name, request.model, request.layout
    return all(not one or one == has for one, has in zip(asked, of, strict=True))


def _cheapest(
    engines: _Compatible, request: PairRequest, held: _HeldUnits, now: float
) -> tuple[float, ListedEngine, ListedEngine] | None:
    """Returns (cost, prefill, decode) of the cheapest pair of one class, in one pass over each side."""
    idlest = _two_idlest(engines.decode.values(), request, now)
    if not idlest:
        return None
    holders = [(_load(one, now), one) for one in held.holders(engines.decode_by_id) if _may_serve(one, request)]
    remote = [(load, held.distance(one), one) for load, one in (*idlest, *holders)]
    units, most = held.units, held.most  # a loop over all engines calls nothing that it need not
    near: dict[str, list[tuple[float, float, ListedEngine]]] = {}
    best: tuple[float, ListedEngine, ListedEngine] | None = None
    for one in engines.prefill.values():
        if not _may_serve(one, request):
            continue
        cost = _load(one, now) + (1.0 - most.get(one.entry.engine_id, 0) / units if units else 0.0)
        if best is not None and cost + idlest[0][0] >= best[0]:
            continue  # even the idlest decode engine, if nothing had to move, makes no cheaper pair
        host = one.entry.host
        if host and host not in near:
            beside = _two_idlest(engines.decode_of.get(host, {}).values(), request, now)
            near[host] = [(load, 0.0, decode) for load, decode in beside]
        # Two of each, because an engine of both roles is no pair with itself.
        for load, distance, decode in (*near.get(host, ()), *remote):
            whole = cost + load + (0.0 if host and host == decode.entry.host else distance)
            if decode is not one and (best is None or whole < best[0]):
                best = (whole, one, decode)
    return best


def _two_idlest(engines: Iterable[ListedEngine], request: PairRequest, now: float) -> list[tuple[float, ListedEngine]]:
    """Returns the two idlest engines that may serve a request, with their loads."""
    first = second = math.inf
    one: ListedEngine | None = None
    other: ListedEngine | None = None
    for engine in engines:
        load = engine.load if not engine.picks else _load(engine, now)
        if load < second and _may_serve(engine, request):
            if load < first:
                second, other = first, one
                first, one = load, engine
            else:
                second, other = load, engine
    return [(load, engine) for load, engine in ((first, one), (second, other)) if engine is not None]


def _may_serve(one: ListedEngine, request: PairRequest) -> bool:
    return _of_tenant(one, request) and one.entry.engine_id not in request.exclude


def _of_tenant(one: ListedEngine, request: PairRequest) -> bool:
    return not one.entry.tenant or one.entry.tenant == request.tenant


def _load(one: ListedEngine, now: float) -> float:
    return one.load + PICK_COST * _picks(one, now) if one.picks else one.load


def _picks(one: ListedEngine, now: float) -> float:
    """Returns the picks of an engine that still count. They fade evenly."""
    left = 1.0 - max(0.0, now - one.picked_at) / PICK_FADE_S
    if left <= 0.0:
        one.picks = 0.0
        return 0.0
    return one.picks * left


def _add_pick(one: ListedEngine, now: float) -> None:
    one.picks, one.picked_at = _picks(one, now) + 1.0, now


def _together(one: ListedEngine, other: ListedEngine) -> bool:
    return bool(one.entry.host) and one.entry.host == other.entry.host


def _reason(found: tuple[float, ListedEngine, ListedEngine], held: _HeldUnits) -> str:
    cost, prefill, decode = found
    where = f"both on host {prefill.entry.host}" if _together(prefill, decode) else "on two hosts"
    one, other = (f"{one.entry.engine_id} (load {one.load:.2f}{held.said(one)})" for one in (prefill, decode))
    return f"cost {cost:.3f}: {one} and {other}, {where}"
