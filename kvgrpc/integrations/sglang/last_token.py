"""The last token of a prompt, which decode computes if its prefill may be an engine of another program.

SGLang's decode goes on from the first token that prefill sampled, which comes with SGLang's own aux. A peer of another
program has no aux. So the KV that moves is that of a prompt without its last token, and to SGLang's decode this token
is what prefill sampled: it is committed as SGLang commits a token that it replays, and the first step of decode samples
what follows it. Before that step's result is taken, the token goes back from the answer into the prompt.

No client sees the token in an answer, and lengths, stops, grammars and penalties count as in one engine.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvgrpc.integrations.across import TOKENS_BACK

TOO_SHORT = "a prompt of one token is not prefilled elsewhere across engines: ask one engine alone"
_HELD = "kvgrpc_last_token"
"""Attribute of SGLang's request: the token that stands in the answer, as long as it does."""
_UNCOUNTED = "kvgrpc_uncounted"
"""Attribute of SGLang's request: True until a step of decode has counted its tokens for penalties."""
_QUEUE = "sglang.srt.disaggregation.decode.DecodeTransferQueue"
_BATCH = "sglang.srt.disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin"
_PENALTIES = "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_ANSWERS = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"


def watch() -> None:
    """Registers the hooks of decode."""
    HookRegistry.register(f"{_QUEUE}.extend", _blocks_there, HookType.BEFORE)
    HookRegistry.register(f"{_QUEUE}._commit_transfer_to_req", _committing, HookType.BEFORE)
    HookRegistry.register(f"{_BATCH}.process_prebuilt", _seeded, HookType.AROUND)
    HookRegistry.register(_PENALTIES, _counting, HookType.AROUND)
    HookRegistry.register(f"{_RESULTS}.process_batch_result_prebuilt", _answered_at_once, HookType.AROUND)
    HookRegistry.register(f"{_RESULTS}.process_batch_result_decode", _computed, HookType.BEFORE)
    HookRegistry.register(f"{_ANSWERS}.accept", _answering, HookType.BEFORE)


def cut(req: Any) -> bool:
    """Takes the last token off the prompt, before SGLang counts its pages. Returns False for a prompt of no more."""
    if len(req.origin_input_ids) <= TOKENS_BACK:
        return False
    setattr(req, _HELD, req.origin_input_ids[-1])
    req.origin_input_ids = req.origin_input_ids[:-1]
    return True


def _put_back(req: Any) -> None:
    """Puts the token from the answer back into the prompt, once."""
    token = getattr(req, _HELD, None)
    if token is not None and req.output_ids:
        setattr(req, _HELD, None)
        req.origin_input_ids = req.origin_input_ids + req.output_ids[:1]
        del req.output_ids[0]


def _blocks_there(queue: Any, requests: list[Any]) -> None:
    """Says that there is nothing more to wait for than the KV. SGLang waits until aux names the room."""
    for found in requests:
        if getattr(found.req, _HELD, None) is not None:
            queue.metadata_buffers.bootstrap_room[found.metadata_buffer_index, 0] = found.req.bootstrap_room


def _committing(_: Any, found: Any) -> None:
    token = getattr(found.req, _HELD, None)
    if token is not None:
        found.is_rebootstrap, found.req.pd_rebootstrap_forced_output_id = True, token


def _seeded(original: Callable[..., None], batch: Any, *rest: Any) -> None:
    """Keeps the token from grammars, which begin with the answer, and from the penalties of a batch that is new."""
    kept = [(req, req.grammar) for req in batch.reqs if getattr(req, _HELD, None) is not None]
    for req, _ in kept:
        setattr(req, _UNCOUNTED, True)
        req.grammar = None
    try:
        original(batch, *rest)
    finally:
        for req, grammar in kept:
            req.grammar = grammar


def _counting(original: Callable[[Any], None], batch: Any) -> None:
    """Lets penalties count the last token of each answer, but not of those where it is the prompt's.

    Each penalizer has tensors with a row for each request. Rows of these requests stay as they were.
    """
    rows = [number for number, req in enumerate(batch.reqs) if getattr(req, _UNCOUNTED, False)]
    if not rows:
        original(batch)
        return
    penalizers = batch.sampling_info.penalizer_orchestrator.penalizers.values()
    kept = [(of, name, value[rows]) for of in penalizers for name, value in _tensors(of)]
    original(batch)
    for of, name, value in kept:
        getattr(of, name)[rows] = value
    for number in rows:
        setattr(batch.reqs[number], _UNCOUNTED, False)


def _tensors(penalizer: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in vars(penalizer).items() if isinstance(value, torch.Tensor)]


def _answered_at_once(original: Callable[..., None], results: Any, batch: Any) -> None:
    """Leaves out requests that have nothing to answer yet."""
    all_of, others = batch.reqs, []
    for req in all_of:
        if getattr(req, _HELD, None) is None or req.to_finish:
            others.append(req)
        else:
            req.time_stats.set_decode_prebuilt_finish_time()
    batch.reqs = others
    try:
        original(results, batch)
    finally:
        batch.reqs = all_of


def _computed(_: Any, batch: Any, *__: Any) -> None:
    for req in batch.reqs:
        _put_back(req)


def _answering(_: Any, *, req: Any) -> None:
    """Puts the token back for a request that ends before it has an answer."""
    _put_back(req)
