"""Makes policies of a scheduler, and requests that arrive at a decode or prefill engine."""

from typing import Any

from kvgrpc.core.policy.policy import Policy
from kvgrpc.core.policy.values import Arrival, Finished, Give, Loss, ModeChoice, Outcome, Rules, Take
from kvgrpc.core.values.layout import Group, GroupKind
from kvgrpc.errors import NextStep, Reason

FULL = Group("full", GroupKind.FULL_ATTENTION, 2, 16, 64, 1, 8, "uint8")
STATE = Group("state", GroupKind.STATE, 2, 16, 64, 1, 8, "uint8")
LOST = Loss(Reason.PEER_LOST, "gone", NextStep.RETRY_OTHER_CONSUMER)
PULL, PUSH = ModeChoice.PULL, ModeChoice.PUSH
COMPLETE, ABORTED = Outcome.COMPLETE, Outcome.ABORTED
R = "r1"
TABLE = ((10, 11, 12, 13, 14),)
KEPT, FREE = Finished(keep=True, handed_over=False), Finished(keep=False, handed_over=False)


def policy(*groups: Group, **rules: Any) -> Policy:
    return Policy(Rules(groups or (FULL,), **rules))


def decode(mode: ModeChoice = PULL, offer: int = 64, prompt: int = 64, **fields: Any) -> Arrival:
    """Makes a request whose prefill is computed elsewhere."""
    return Arrival(R, prompt, Take(mode, offer), **fields)


def prefill(mode: ModeChoice = PULL, prompt: int = 64, **fields: Any) -> Arrival:
    return Arrival(R, prompt, give=Give(mode), **fields)


def loading(made: Policy, arrival: Arrival, computed: int = 0) -> Policy:
    """Feeds an arrival, allocates its blocks, drops the tasks so far, and returns the policy."""
    made.arrived(arrival)
    made.allocated(R, TABLE, computed, made.match(R, computed).tokens)
    made.take_tasks()
    return made
