"""The demo's conversation: KV that D made in one turn goes back to P for the next.

D offers prompt and reply after each turn, under a lease that the router renews while the user writes. P takes the
missing KV if it is worth it: after a long reply it pulls, after a short one it recomputes those few tokens.
"""

import os

from examples.demo.results import ChatTurn
from examples.demo.router import Answer, Request, Router
from kvgrpc import client
from kvgrpc.errors import InternalError, Reason

TURNS = (
    ("My first question: who may free a block that is being read?", 72),
    (" And my second: who says when?", 8),
    (" Then thank you.", 24),
)
"""The user's message of each turn, and the length of the reply in tokens."""
OFFER_TTL_S = 20.0


async def converse(router: Router, decode_server: client.Client) -> list[ChatTurn]:
    """Runs the whole conversation. It ends early if a turn fails."""
    turns: list[ChatTurn] = []
    said, offered = "", Answer()
    for number, (text, count) in enumerate(TURNS, 1):
        request = Request(f"turn {number}", said + text, count)
        request.decode["offer"] = {"transfer_key": os.urandom(16).hex(), "ttl_s": OFFER_TTL_S}
        turn, answer = await _turn(router, decode_server, request, offered)
        turns.append(turn)
        if turn.served.error:
            return turns
        said = request.prompt + bytes(answer["tokens"]).decode()
        offered = answer
    await decode_server.release_lease(offered["lease_id"])  # the chat is over
    return turns


async def _turn(
    router: Router, decode_server: client.Client, request: Request, offered: Answer
) -> tuple[ChatTurn, Answer]:
    """Runs one turn, and returns D's answer. The lease of `offered`, the previous answer, is renewed until P comes for
    it.
    """
    if not offered:
        served = await router.serve(request)
        return ChatTurn(served.result), served.decode
    request.prefill["offer"] = offered["offer"]
    async with decode_server.keep_alive(offered["lease_id"]):
        lease = (await decode_server.get_lease(offered["lease_id"])).lease
        served = await router.serve(request)
    history = served.prefill.get("history")
    if history is None:
        raise InternalError(Reason.INTERNAL, f"P did not look at the history: {served.prefill}")
    turn = ChatTurn(
        served.result,
        held_tokens=history["held_tokens"],
        offered_tokens=lease.token_count,
        pulled_tokens=history["pulled_tokens"],
        recompute_tokens=history["recompute_tokens"],
        renewals=lease.renewal_count,
    )
    return turn, served.decode
