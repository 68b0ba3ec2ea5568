"""What the KV of one of vLLM's requests is of, beside its adapter and salt; since when there is that request, and which
trace it is a part of.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
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


def is_streamed(request: "Request") -> bool:
    """Whether vLLM's own API answers bit by bit: then its answer has no `kv_transfer_params`."""
    sampling = request.sampling_params
    named = request.request_id.startswith(("cmpl-", "chatcmpl-"))
    return named and sampling is not None and sampling.output_kind is RequestOutputKind.DELTA


def reached(request: "Request", here: int, tokens: int) -> None:
    """The KV of so many tokens came for a request that waits for that of more, those that were `here` among them. VLLM
    computes the rest in the blocks that it has.
    """
    request.num_computed_tokens = tokens
    if request.prefill_stats is not None:
        request.prefill_stats.set(
            num_prompt_tokens=request.num_prompt_tokens, num_local_cached_tokens=here,
            num_external_cached_tokens=tokens - here,
        )  # fmt: skip


def begin_anew(request: "Request", manager: Any) -> None:
    """Nothing came for a request that waits for its KV. VLLM looks for it once more, and gives it blocks, as its own
    scheduler has it where a load fails and is to be computed. `manager`: its KVCacheManager, whose blocks are at rest.
    """
    manager.free(request)
    request.num_computed_tokens = 0


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


def shorten(request: "Request", tokens: int) -> None:
    """VLLM computes no more of its prompt than these tokens, as its own connectors do it; 0: it has no token ids. Its
    scheduler has not looked at the request yet, and nothing is cached under the name of a block that is not computed
    to its end.
    """
    if request.prompt_token_ids is not None and 0 < tokens < len(request.prompt_token_ids):
        request.prompt_token_ids = request.prompt_token_ids[:tokens]
        del request._all_token_ids[tokens:]  # noqa: SLF001 - what shows it elsewhere is a view of this list
        request.num_prompt_tokens = tokens
