"""Brings a pull of a lead `d` from a peer `p` to each of its stages, and feeds its events."""

from typing import Any

from kvgrpc.core.actions import Cancelled
from kvgrpc.core.events import AccessAnswered, CancelTransfer, PostingEnded, SettleAnswered
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from tests.core.nodes import Lead, access_id, answer_of, describe, grant

P = describe("p", 1)
TOKEN = grant(P)
LOST = Unavailable(Reason.PEER_UNREACHABLE, "no answer")


def failure_of(lead: Lead, transfer: Transfer) -> Any:
    failure = lead.transfer(transfer.id).failure
    assert failure is not None
    return failure


def opened(lead: Lead, number: int = 1, **changes: Any) -> list[Any]:
    return lead.feed(AccessAnswered(access_id(number), answer_of(P, **changes)))


def posted(lead: Lead, transfer: Transfer, rank: int = 0, *, done: bool = True, nbytes: int = 32) -> list[Any]:
    return lead.feed(PostingEnded(f"{transfer.id}/{rank}.{rank}", done, nbytes, message="" if done else "it broke"))


def settled(lead: Lead, verdict: Verdict | KVGrpcError | None = None, *, retryable: bool = False) -> list[Any]:
    return lead.feed(SettleAnswered(access_id(), verdict or Verdict(True), retryable))


def cancel(lead: Lead, **which: Any) -> Cancelled:
    answer = lead.call(lambda c: CancelTransfer(c, **which))
    assert isinstance(answer, Cancelled)
    return answer


def at_stage(lead: Lead, stage: str) -> Transfer:
    """Starts a pull, and brings it to that stage."""
    if stage == "connecting":
        lead.begin(describe("d", 3))
    pull = lead.pull(TOKEN, 32, (4, 5)) if stage != "waiting" else lead.pull(TOKEN)
    if stage in ("waiting", "stepping", "wire", "settling"):
        opened(lead)
    if stage == "settling":
        posted(lead, pull)
    return lead.transfer(pull.id)


STAGES = ("connecting", "opening", "waiting", "wire", "settling")
