"""Hooks in SGLang's queues: requests for senders and receivers, and no reuse of pages without proof.

SGLang gives a sender and a receiver the room of their request and nothing else. The prompt says what the KV is of.
"""

import math
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvgrpc.integrations.sglang import last_token
from kvgrpc.integrations.sglang.manager import KVManager
from kvgrpc.integrations.sglang.receiver import KVReceiver
from kvgrpc.integrations.sglang.sender import KVSender

_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
_IDLE = "sglang.srt.managers.scheduler.Scheduler.on_idle"
_RELEASE = "sglang.srt.disaggregation.decode.DecodeTransferQueue._defer_release"


def watch(*, across: bool) -> None:
    """Sets the hooks, once, in a process with a scheduler. `across`: engines of other programs are peers."""
    HookRegistry.register(_PREFILL, _sender_created, HookType.AFTER)
    HookRegistry.register(_DECODE, _receiver_created, HookType.AFTER)
    HookRegistry.register(_RELEASE, _release_deferred, HookType.BEFORE)
    HookRegistry.register(_IDLE, _nothing_to_run, HookType.BEFORE)
    if across:
        last_token.watch()
    HookRegistry.apply_hooks()


def _sender_created(created: bool, _: Any, req: Any, *__: Any, **___: Any) -> None:
    sender = req.disagg_kv_sender
    if not created or not isinstance(sender, KVSender):
        return
    if sender.kv_mgr.across and not last_token.cut(req):
        sender.abort(last_token.TOO_SHORT)
    else:
        sender.begin(req)


def _receiver_created(found: Any, _: Any, req: Any, *__: Any, **___: Any) -> None:
    receiver = found.kv_receiver
    if not isinstance(receiver, KVReceiver):
        return
    receiver.req = req
    if receiver.kv_mgr.across and not last_token.cut(req):
        receiver.abort(last_token.TOO_SHORT)


def _nothing_to_run(scheduler: Any) -> None:
    """Waits for news while SGLang has nothing to compute. It would look again at once, and take the processor from the
    leads and ranks that move what it waits for.
    """
    for name in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        manager = getattr(getattr(scheduler, name, None), "kv_manager", None)
        if isinstance(manager, KVManager):
            manager.wait()


def _release_deferred(queue: Any, found: Any) -> None:
    """Takes the deadline away at which SGLang would reuse pages that a peer may still write to."""
    if isinstance(found.kv_receiver, KVReceiver):
        queue.deferred_kv_release_timeout = math.inf
