"""Named tensors between two engines, beside raw Gloo with messages of the same sizes."""

import statistics
from collections.abc import Callable
from functools import partial

from bench.measures.timed_pairs import quartiles, timed_pairs
from bench.plan import TensorsPlan
from bench.results.tensors import TensorCase, TensorResult
from bench.stages.stores import RawStores, Stores
from bench.told import Told
from kvgrpc.core.tensors.bundles import BYTES_MAX
from kvgrpc.core.tensors.line import RESERVED

_WARM = 2


def measure(plan: TensorsPlan, found: TensorResult, told: Told) -> None:
    """Measures all cases of the plan, and a store at its limit."""
    with RawStores(plan.pool_bytes) as raw:
        for data_path in plan.data_paths:
            for tensor_bytes in plan.block_bytes:
                count = plan.pool_bytes // tensor_bytes
                told(f"{data_path}: {count} tensors of {tensor_bytes >> 10} KB")
                with Stores(data_path, tensor_bytes, count, room=_ample(count, tensor_bytes)) as stores:
                    stores.check()
                    found.cases += _cases(plan, data_path, tensor_bytes, stores, raw)
    for data_path in plan.data_paths:
        told(f"{data_path}: a store at its limit")
        found.full_ratio[data_path] = _full(plan, data_path)


def _cases(plan: TensorsPlan, data_path: str, tensor_bytes: int, stores: Stores, raw: RawStores) -> list[TensorCase]:
    one_by_one = partial(raw.move_s, tensor_bytes, 1)
    at_once = partial(raw.move_s, tensor_bytes, plan.gets_at_once)
    put_s = partial(stores.put_s, plan.gets_at_once)
    ways: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "put_async": (partial(put_s, at_once=True), at_once),
        "put_in_place": (partial(put_s, at_once=True, in_place=True), at_once),
        "get": (partial(stores.fetch_s, plan.gets_at_once), at_once),
        "put": (partial(put_s, at_once=False), one_by_one),
    }
    return [
        _case(plan, f"{data_path} {way} {tensor_bytes >> 10} KB", data_path, way, tensor_bytes, *both)
        for way, both in ways.items()
    ]


def _case(  # noqa: PLR0913, PLR0917 - what identifies the case, and the two ways
    plan: TensorsPlan,
    name: str,
    data_path: str,
    way: str,
    tensor_bytes: int,
    ours: Callable[[], float],
    gloo: Callable[[], float],
) -> TensorCase:
    for _ in range(_WARM):
        ours(), gloo()
    times = timed_pairs(plan.repeats, ours, gloo)
    return TensorCase(
        name=name,
        datapath=data_path,
        way=way,
        tensor_bytes=tensor_bytes,
        tensors=plan.pool_bytes // tensor_bytes,
        gbps=plan.pool_bytes / statistics.median(own for own, _ in times) / 1e9,
        gloo_gbps=plan.pool_bytes / statistics.median(raw for _, raw in times) / 1e9,
        ratio_gloo=statistics.median(raw / own for own, raw in times),
        quartiles={
            "gbps": quartiles([plan.pool_bytes / own / 1e9 for own, _ in times]),
            "gloo_gbps": quartiles([plan.pool_bytes / raw / 1e9 for _, raw in times]),
            "ratio_gloo": quartiles([raw / own for own, raw in times]),
        },
    )


def _ample(count: int, tensor_bytes: int) -> int:
    """Returns the room for `count` tensors and for any bundle, beside the part of a store that is reserved for what its
    engine waits for.
    """
    return max(-(-count * RESERVED // (RESERVED - 1)), -(-BYTES_MAX * RESERVED // tensor_bytes))


def _full(plan: TensorsPlan, data_path: str) -> float:
    """Returns how fast tensors go into a store that is nearly always full, over one with room for all of them."""
    tensor_bytes = plan.block_bytes[len(plan.block_bytes) // 2]
    count = plan.pool_bytes // tensor_bytes
    room = min(plan.full_tensors, max(count // 2, 1))
    with (
        Stores(data_path, tensor_bytes, count, room=room) as full,
        Stores(data_path, tensor_bytes, count, room=_ample(count, tensor_bytes)) as ample,
    ):
        into_full, into_ample = (partial(stores.put_s, plan.gets_at_once, at_once=True) for stores in (full, ample))
        for _ in range(_WARM):
            into_full(), into_ample()
        return statistics.median(b / a for a, b in timed_pairs(plan.repeats, into_full, into_ample))
