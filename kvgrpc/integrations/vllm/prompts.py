"""Facts about vLLM's requests: the content of their KV beside adapter and salt, their begin and their trace; and
changes to what vLLM computes of them.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import RequestStatus

from kvgrpc.core.values.content import Item
from kvgrpc.integrations.params import traceparent_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

COMPLETE = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
"""Final states of a request that has its prompt's KV as a whole."""


def arrived_us(request: "Request") -> int:
    """Returns when the engine heard of a request, as by time.time_ns() // 1000."""
    return int(request.arrival_time * 1e6)


def is_streamed(request: "Request") -> bool:
    """Returns whether vLLM's own API answers bit by bit: then its answer has no `kv_transfer_params`."""
    sampling = request.sampling_params
    named = request.request_id.startswith(("cmpl-", "chatcmpl-"))
    return named and sampling is not None and sampling.output_kind is RequestOutputKind.DELTA


def reached(request: "Request", here: int, tokens: int) -> None:
    """Notes that a request which waits for more KV has the KV of `tokens` tokens, with those that were `here`. The rest
    is computed by vLLM in the blocks that the request has.
    """
    request.num_computed_tokens = tokens
    stats, prompt = request.prefill_stats, request.num_prompt_tokens
    if stats is not None:
        stats.set(num_prompt_tokens=prompt, num_local_cached_tokens=here, num_external_cached_tokens=tokens - here)


def begin_anew(request: "Request", manager: Any) -> bool:
    """Turns a failed load into one of no tokens: vLLM looks for KV once more, and gives blocks, as its own scheduler
    does after a failed load. The fate of failed loads is set by a key of vLLM's for all connectors, which is out of
    reach if several share an engine. `manager`: vLLM's KVCacheManager; the blocks are at rest. Returns False if the
    request cannot begin anew, which is logged.
    """
    try:
        manager.free(request)
        request.num_computed_tokens = 0
    except Exception:  # noqa: BLE001 - logged: the load fails
        _log.exception("request %s cannot begin anew", request.request_id)
        return False
    return True


def trace_of(request: "Request", params: Mapping[str, Any]) -> str:
    """Returns the traceparent of the request's HTTP headers, or of its params; empty: neither has one. vLLM passes
    headers on only if it exports spans of its own (`--otlp-traces-endpoint`).
    """
    return traceparent_of(request.trace_headers or {}) or traceparent_of(params)


def named_prompt(request: "Request") -> Sequence[int]:
    """Returns the token ids if they are, with `items_of`, all that the KV is of; otherwise none. Embeddings stand
    behind placeholder ids, which are the same for others.
    """
    return () if request.prompt_embeds is not None else request.prompt_token_ids or ()


def items_of(request: "Request") -> tuple[Item, ...]:
    """Returns images and the like at their placeholder ids, named as vLLM's own prefix cache names them."""
    found = []
    for feature in request.mm_features:
        digest = hashlib.sha256(f"{feature.modality}\0{feature.identifier}".encode()).digest()
        found.append(Item(digest, feature.mm_position.offset, feature.mm_position.length))
    return tuple(found)


def shorten(request: "Request", tokens: int) -> None:
    """Makes vLLM compute no more of a prompt than `tokens`, as its own connectors do; 0: it has no token ids. At this
    point vLLM's scheduler has not looked at the request, and nothing is cached under the name of a block that is not
    computed to its end.
    """
    if request.prompt_token_ids is not None and 0 < tokens < len(request.prompt_token_ids):
        request.prompt_token_ids = request.prompt_token_ids[:tokens]
        del request._all_token_ids[tokens:]  # noqa: SLF001 - what shows it elsewhere is a view of this list
        request.num_prompt_tokens = tokens
