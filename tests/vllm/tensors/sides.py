"""The scheduler's side without an engine."""

import base64
import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

from kvgrpc.core.policy.values import Loss
from kvgrpc.errors import NextStep, Reason
from kvgrpc.integrations.vllm.tensors.messages import WorkerNews
from kvgrpc.integrations.vllm.tensors.options import TensorOptions
from kvgrpc.integrations.vllm.tensors.scheduler_side import TensorSchedulerSide
from tests.vllm.cores import BLOCK_TOKENS, pool_of, request_of
from tests.vllm.engines import PREFILL

LAYOUT, _ = pool_of(states=False)
BLOCK_BYTES = sum(region.block_bytes for region in LAYOUT.regions)
KEY, PEER = os.urandom(16), "127.0.0.1:7000"
TABLE = list(range(1, 9))
DIED = Loss(Reason.PEER_LOST, "its source died", NextStep.RECOMPUTE)


def side_of(ranks: int = 1, **options: Any) -> TensorSchedulerSide:
    """Returns a scheduler's side whose parts are blocks."""
    made, blocks = TensorOptions(part_tokens=BLOCK_TOKENS, **options), SimpleNamespace(get_block_ids=lambda _: (TABLE,))
    return TensorSchedulerSide(made, LAYOUT, ranks, "127.0.0.1:5000", blocks)


def intent(key: bytes = KEY, peer: str = PEER) -> dict[str, Any]:
    return {"kvgrpc_intent": {"transferKey": base64.b64encode(key).decode(), "peer": {"address": peer}}}


def giving(name: str, key: bytes = KEY, **fields: Any) -> Any:
    """Returns a request that is prefilled here."""
    return request_of(name, {**PREFILL, **intent(key)}, **fields)


def taking(name: str, key: bytes = KEY, **fields: Any) -> Any:
    """Returns a request that is prefilled elsewhere."""
    return request_of(name, {"do_remote_prefill": True, **intent(key)}, **fields)


def held(side: TensorSchedulerSide, name: str, parts: int, workers: int = 1, key: bytes = KEY) -> None:
    """Reports that this many workers hold this many parts for the request."""
    side.hear(WorkerNews(held=Counter({(name, key, parts): workers})))
