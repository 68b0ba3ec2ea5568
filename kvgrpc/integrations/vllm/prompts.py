"""What the KV of one of vLLM's requests is of, beside its adapter and salt; since when there is that request, and which
trace it is a part of.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvgrpc.core.values.content import Item
from kvgrpc.integrations.params import traceparent_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

COMPLETE = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
"""How a request ends that has its prompt's KV as a whole."""


def arrived_us(request: "Request") -> int:
    """When its engine heard of it, as by time.time_ns() // 1000."""
    return int(request.arrival_time * 1e6)


def trace_of(request: "Request", params: Mapping[str, Any]) -> str:
    """The traceparent of its HTTP request, else the one in its params; empty: neither has one. vLLM passes headers on
    only where it exports spans of its own (`--otlp-traces-endpoint`).
    """
    return traceparent_of(request.trace_headers or {}) or traceparent_of(params)


def named_prompt(request: "Request") -> Sequence[int]:
    """The token ids, where they are, with `items_of`, all that the KV is of. Embeddings stand behind placeholder ids,
    which are the same for others.
    """
    return () if request.prompt_embeds is not None else request.prompt_token_ids or ()


def items_of(request: "Request") -> tuple[Item, ...]:
    """Images and the like, named by what vLLM's own prefix cache takes them for, at their placeholder ids."""
    found = []
    for feature in request.mm_features:
        digest = hashlib.sha256(f"{feature.modality}\0{feature.identifier}".encode()).digest()
        found.append(Item(digest, feature.mm_position.offset, feature.mm_position.length))
    return tuple(found)
