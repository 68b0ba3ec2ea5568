"""What routers do with the legs of a request, whatever the modes of the two engines are."""

from collections.abc import Callable
from typing import Any

from kvgrpc.core.policy.values import Mode
from tests.vllm.cores import Core, Cores
from tests.vllm.engines import wait_until

Made = Callable[[Mode, Mode], Cores]
AT_P = "cmpl-7c1e-0-0123abcd"
"""A request at P, and the same one at D: vLLM's engines add eight digits to the id that the router gave both."""
AT_D = "cmpl-7c1e-0-89ab4567"


def address(core: Core) -> dict[str, Any]:
    """What a proxy for pushes is told of P by its operator."""
    host, _, port = core.side.address.rpartition(":")
    return {"remote_engine_id": "P", "remote_host": host, "remote_port": int(port), "tp_size": 1, "pp_size": 1}


def decode_leg(p: Core, router_id: str = "7c1e") -> dict[str, Any]:
    """Of vLLM's proxy for pushes, without a transfer id, as in 0.32."""
    return {"do_remote_decode": False, "do_remote_prefill": True, "remote_request_id": router_id, **address(p)}


def compute(p: Core, request: Any) -> dict[str, Any]:
    """Two steps of a prefill, and its answer."""
    name = request.request_id
    p.tables[name] = p.computing(request)
    p.step({name: 32})
    request.num_computed_tokens = 32
    p.step({name: 8})
    return p.left(request, p.tables[name])


def came(p: Core, d: Core, name: str) -> bool:
    """How a load ended: whether with KV, which is P's then."""
    wait_until(lambda: p.step() and d.step() and d.told.loaded == {name})
    wait_until(lambda: p.step() and p.used() == 0)
    return not d.told.failed


def holds_the_kv(d: Core, blocks: list[int]) -> bool:
    return all(bool((layer[blocks] == 7 + number).all()) for number, layer in enumerate(d.memory.values()))
