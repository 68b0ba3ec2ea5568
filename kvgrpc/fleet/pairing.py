"""The choice of a pair: one engine to compute a prompt, and one to decode.

Both have the same model and the same layout, serve the tenant, and are healthy. Of all such pairs the one with the
least cost is chosen. The cost of a pair is the load of both, plus the share of the prompt that the first engine has to
compute, plus `REMOTE_COST` if the two are on different hosts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvgrpc.fleet.directory import Directory, EngineState, ListedEngine
from kvgrpc.fleet.entry import EngineRole
from kvgrpc.fleet.prefixes import PrefixIndex

REMOTE_COST = 0.25
"""Cost of a pair on two hosts, as a load."""
PICK_COST = 0.02
"""Load that a pick adds to an engine until the engine's own load is told."""
PICK_FADE_S = 2.0
"""Time after which a pick no longer counts, in seconds."""


@dataclass(frozen=True)
class PairRequest:
    """Needs of a request."""

    model: str = ""
    """Digest of the model; empty: any."""
    tenant: str = ""
    chain: Sequence[bytes] = ()
    """Digests of the prompt's units; empty: prefixes do not count."""
    exclude: frozenset[str] = frozenset()
    """Engine ids that are not to be chosen, for a request that is tried again."""


@dataclass(frozen=True)
class PickedPair:
    """The chosen engines, and why."""

    prefill: ListedEngine
    decode: ListedEngine
    cost: float
    prefix_units: int
    same_host: bool
    reason: str


@dataclass(frozen=True)
class NoPair:
    """No pair fits; `reason` counts what was in the way."""

    reason: str


@dataclass
class _Compatible:
    """Healthy engines with one model, one layout and one tenant."""

    prefill: list[ListedEngine] = field(default_factory=list)
    decode: list[ListedEngine] = field(default_factory=list)
    decode_of: dict[str, list[ListedEngine]] = field(default_factory=dict)
    """The decode engines of each host."""


class PairPicker:
    """Chooses pairs of a directory. It keeps the healthy engines by model and layout until something changes."""

    def __init__(self, directory: Directory, prefixes: PrefixIndex | None = None) -> None:
        self.prefixes = prefixes or PrefixIndex()
        self._directory = directory
        self._classes: dict[tuple[str, str], _Compatible] = {}
        self._states: dict[EngineState, int] = {}
        self._version = -1
        self._from = self._until = -math.inf

    def pick_pair(self, request: PairRequest, now: float) -> PickedPair | NoPair:
        """Returns the pair with the least cost, or why there is none."""
        self._look(now)
        held = self.prefixes.units_held(request.chain)
        best: tuple[float, ListedEngine, ListedEngine] | None = None
        for (model, _), engines in self._classes.items():
            if request.model and model != request.model:
                continue
            found = _cheapest(engines, request, held, now)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is None:
            return NoPair(self._why_none(request))
        cost, prefill, decode = best
        _add_pick(prefill, now)
        _add_pick(decode, now)
        units = held.get(prefill.entry.engine_id, 0)
        return PickedPair(prefill, decode, cost, units, _together(prefill, decode), _reason(best, units, request))

    def _look(self, now: float) -> None:
        """Sorts the healthy engines by model and layout, if something has changed."""
        if self._version == self._directory.version and self._from <= now <= self._until:
            return
        proof_s = self._directory.limits.proof_s
        self._classes, self._states = {}, {}
        self._from, self._until = now, math.inf
        for one in self._directory:
            state = self._directory.state(one, now)
            self._states[state] = self._states.get(state, 0) + 1
            if state is not EngineState.HEALTHY:
                continue
            self._until = min(self._until, one.proved_at + proof_s)
            entry = one.entry
            engines = self._classes.setdefault((entry.model, entry.layout), _Compatible())
            if entry.role is not EngineRole.DECODE:
                engines.prefill.append(one)
            if entry.role is not EngineRole.PREFILL:
                engines.decode.append(one)
                engines.decode_of.setdefault(entry.host, []).append(one)
        self._version = self._directory.version

    def _why_none(self, request: PairRequest) -> str:
        counts = ", ".join(f"{count} {state.value}" for state, count in sorted(self._states.items()))
        classes = [c for (model, _), c in self._classes.items() if not request.model or model == request.model]
        sides = "; ".join(f"{len(c.prefill)} prefill and {len(c.decode)} decode" for c in classes[:4])
        wanted = f" of model {request.model}" if request.model else ""
        return (
            f"no pair{wanted} for tenant {request.tenant!r}: engines: {counts or 'none'}; compatible: {sides or 'none'}"
        )


def _cheapest(
    engines: _Compatible, request: PairRequest, held: dict[str, int], now: float
) -> tuple[float, ListedEngine, ListedEngine] | None:
    """Returns (cost, prefill, decode) of the cheapest pair of one class, in one pass over each side."""
    idlest = _two_idlest(engines.decode, request, now)
    if not idlest:
        return None
    near: dict[str, list[tuple[float, ListedEngine]]] = {}
    units = len(request.chain)
    best: tuple[float, ListedEngine, ListedEngine] | None = None
    for one in engines.prefill:
        if not _may_serve(one, request):
            continue
        cost = _load(one, now) + (1.0 - held.get(one.entry.engine_id, 0) / units if units else 0.0)
        if best is not None and cost + idlest[0][0] >= best[0]:
            continue  # even the idlest decode engine, on its host, makes no cheaper pair
        host = one.entry.host
        if host and host not in near:
            near[host] = _two_idlest(engines.decode_of.get(host, ()), request, now)
        # Two of each, because an engine of both roles is no pair with itself.
        for other, decode in (*near.get(host, ()), *idlest):
            whole = cost + other + (0.0 if _together(one, decode) else REMOTE_COST)
            if decode is not one and (best is None or whole < best[0]):
                best = (whole, one, decode)
    return best


def _two_idlest(engines: Sequence[ListedEngine], request: PairRequest, now: float) -> list[tuple[float, ListedEngine]]:
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
    entry = one.entry
    return (not entry.tenant or entry.tenant == request.tenant) and entry.engine_id not in request.exclude


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


def _reason(found: tuple[float, ListedEngine, ListedEngine], units: int, request: PairRequest) -> str:
    cost, prefill, decode = found
    where = f"both on host {prefill.entry.host}" if _together(prefill, decode) else "on two hosts"
    prefix = f", {units} of {len(request.chain)} units held" if request.chain else ""
    return (
        f"cost {cost:.3f}: {prefill.entry.engine_id} (load {prefill.load:.2f}{prefix}) and {decode.entry.engine_id} "
        f"(load {decode.load:.2f}), {where}"
    )
