"""The legs of a request as routers run them, for any modes of the two engines."""

from collections.abc import Callable
from typing import Any

from tests.vllm.cores import Core, Cores
from tests.vllm.engines import wait_until

Made = Callable[..., Cores]
AT_P = "cmpl-7c1e-0-0123abcd"
"""A request at P, and the same one at D: vLLM's engines append eight digits to the id that the router gave both."""
AT_D = "cmpl-7c1e-0-89ab4567"


def address(core: Core) -> dict[str, Any]:
    """Returns P's address as an operator configures it in a proxy for pushes."""
    host, _, port = core.side.engine.address.rpartition(":")
    return {"remote_engine_id": "P", "remote_host": host, "remote_port": int(port), "tp_size": 1, "pp_size": 1}


def decode_leg(p: Core, router_id: str = "7c1e") -> dict[str, Any]:
    """Returns the decode leg of vLLM's proxy for pushes, without a transfer id, as in 0.32."""
    return {"do_remote_decode": False, "do_remote_prefill": True, "remote_request_id": router_id, **address(p)}


def compute(p: Core, request: Any) -> dict[str, Any]:
    """Computes a prefill in two steps, and returns the answer's params."""
    name = request.request_id
    p.tables[name] = p.computing(request)
    p.step({name: 32})
    request.num_computed_tokens = 32
    p.step({name: 8})
    return p.left(request, p.tables[name])


def came(p: Core, d: Core, name: str) -> bool:
    """Waits for the end of a load, and until P has its blocks back. Returns True if the KV came."""
    wait_until(lambda: p.step() and d.step() and d.told.loaded == {name})
    wait_until(lambda: p.step() and p.used() == 0)
    return not d.told.failed


def holds_the_kv(d: Core, blocks: list[int]) -> bool:
    return all(bool((layer[blocks] == 7 + number).all()) for number, layer in enumerate(d.memory.values()))
