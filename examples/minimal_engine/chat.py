"""Conversations on the demo's engine: the prefill side takes the KV of earlier turns back from the decode side.

After a turn the decode engine hands over what it has: the prompt and its own reply. The next turn's prefill engine has
a part of that itself. It pulls the rest, unless the rest is so little that computing it takes no longer.
"""

from typing import Any

from examples.minimal_engine.engine import MinimalEngine, Request, TransferFailed
from kvgrpc.engine import HandOver, content

RECOMPUTE_TOKENS = 32
"""Minimum number of tokens for which history is pulled. A pull costs some milliseconds however short it is, and so does
a tile of 16 tokens in this transformer.
"""


def offer(engine: MinimalEngine, request: Request, **labels: Any) -> HandOver:
    """Hands prompt and reply over for the next turn: the tokens whose KV exists, so not the last one."""
    return engine.hand_over(Request(request.ids[: request.have_tokens], request.table, request.have_tokens), **labels)


def take_history(engine: MinimalEngine, request: Request, grant: bytes, **labels: Any) -> int:
    """Takes history from the engine that offers it. Returns how many tokens came. The lease on it ends in any case.

    If little or nothing is missing, the offer is only released. What does not come is computed like the rest of the
    prompt.
    """
    held = request.have_tokens
    offered = engine.engine.pull(grant, content(request.ids), **labels)
    if offered.use_tokens - held < RECOMPUTE_TOKENS:
        offered.start()
        engine.engine.flush()
        return 0
    try:
        engine.fill(request, offered)
    except TransferFailed:
        return 0
    return request.have_tokens - held
