"""Two engines that move a prompt as named tensors."""

import base64
import os
from collections.abc import Sequence
from typing import Any

from tests.vllm.engines import LEAD, MAX_TOKENS, PREFILL, Answer, Engine, Engines, Pair, wait_until

PART_TOKENS = 128
STORE_BYTES, LONG = 3 << 20, 1400
"""Size of a store in bytes, and length of a prompt whose tensors take nine tenths of it, in tokens."""
EXTRA = {"mode": "tensors", "part_tokens": PART_TOKENS, "store_bytes": STORE_BYTES, "timeout_s": 90.0, "ttl_s": 20.0}
"""Settings in `kv_connector_extra_config`. The timeout is longer than any test, so none waits for it."""


class TensorPair(Pair):
    """P and D, each with a store."""

    def __init__(self, engines: Engines, send: str, **extra: Any) -> None:
        super().__init__(engines, send=send, **{**EXTRA, **extra})
        self.send = send

    def intent(self, key: bytes, peer: Engine) -> dict[str, Any]:
        """Returns the intent of a router that knows both engines."""
        found = {"transferKey": base64.b64encode(key).decode(), "peer": {"address": peer.address}}
        return {"kvgrpc_intent": found}

    def begin_prefill(self, prompt: Sequence[int], key: bytes = b"", **more: Any) -> int:
        """Begins P's leg. If tensors are kept it names no peer, like routers that do not know kvgrpc."""
        params = PREFILL if self.send == "get" and not key else PREFILL | self.intent(key or os.urandom(16), self.d)
        return self.p.begin(prompt, params, 1, **more)

    def moved(self, prompt: Sequence[int], **more: Any) -> Answer:
        """Runs one leg after the other; D's leg has the params of P's answer."""
        prefilled = self.p.answer(self.begin_prefill(prompt, **more))
        assert not prefilled.failed, prefilled
        return self.d.ask(prompt, prefilled.params, **more)

    def begin_both(self, prompt: Sequence[int], *, first: str = "D", max_tokens: int = MAX_TOKENS) -> dict[str, int]:
        """Begins both legs at once."""
        key, legs = os.urandom(16), {}
        for name in (first, "DP".replace(first, "")):
            if name == "P":
                legs["P"] = self.begin_prefill(prompt, key)
            else:
                params = {"do_remote_prefill": True, **self.intent(key, self.p)}
                legs["D"] = self.d.begin(prompt, params, max_tokens)
        return legs

    def both(self, prompt: Sequence[int], *, first: str = "D") -> Answer:
        legs = self.begin_both(prompt, first=first)
        assert not self.p.answer(legs["P"]).failed
        return self.d.answer(legs["D"])

    def lost(self, answer: Answer, prompt: Sequence[int]) -> bool:
        """Checks that a request whose KV did not come ended as configured: D fails it or computes it."""
        if self.on_loss["D"] == "fail":
            return answer.failed
        return answer.tokens == self.expected(prompt)

    def at_rest(self) -> None:
        """Waits until no tensor, lease or page is at either store, and no block at either engine."""
        super().at_rest()
        for engine in (self.p, self.d):
            if engine.alive and engine.tree(LEAD):
                wait_until(lambda e=engine: not any(stored(e).values()), lambda e=engine: stored(e))  # type: ignore[misc]


def stored(engine: Engine) -> dict[str, int]:
    """Returns the counts of what is in its store, or arriving."""
    with engine.lead() as lead:
        status, tensors = lead.tensors().status(), lead.tensors().list()
    pages = {"pages": status.used_page_count, "spilled": status.used_spill_page_count}
    counts = {"tensors": status.tensor_count, "offered": status.offered_count, "listed": len(tensors.tensors)}
    return {**pages, **counts}
