"""kvgrpc moves KV-cache blocks between LLM engines, as a gRPC microservice.

    kvgrpc.connect    a client of a server, for routers and schedulers (`kvgrpc.client` has the rest)
    kvgrpc.Engine     an engine's scheduler attached to its lead (`kvgrpc.engine`)
    kvgrpc.Rank       a worker's share of the pool

Names are imported when they are used: a router's base install has no numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgrpc.client import connect
    from kvgrpc.engine import Engine, Rank

__all__ = ["Engine", "Rank", "__version__", "connect"]

__version__ = "0.1.0"

_HOMES = {"Engine": "kvgrpc.engine", "Rank": "kvgrpc.engine", "connect": "kvgrpc.client"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvgrpc' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
