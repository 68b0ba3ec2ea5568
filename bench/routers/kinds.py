"""The routers, and the modes of engines. This module is pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.routers.cases import CHAT, PROMPTS, SEVERAL, TALK, Case

AUTO, PULL, PUSH, TENSORS = MODES = ("auto", "pull", "push", "tensors")
"""Modes of both engines."""
LATER, BOTH = "one after the other", "both at once"


@dataclass(frozen=True)
class Router:
    """A program that clients talk to in place of engines."""

    name: str
    legs: str
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Kinds of requests that it does not serve with any engine, with the reason."""

    def serves(self, case: Case) -> bool:
        """Returns True if the router gets this request."""
        return case.kind not in self.lacks and not (case.path == TALK and CHAT in self.lacks)


ONE_ANSWER = "it puts all answers together as one"
TOY_PROXY = "vLLM's toy proxy"
ROUTERS = (
    Router("vllm-router", LATER),
    Router("vllm-router, engines register", LATER),
    Router(TOY_PROXY, LATER),
    Router("vLLM's multi-turn proxy", LATER, {SEVERAL: ONE_ANSWER, PROMPTS: ONE_ANSWER}),
    Router("vLLM's push proxy", BOTH),
    Router("vLLM's XpYd proxy", LATER, {CHAT: "it has no chat"}),
    Router("production-stack", LATER),
    Router("llm-d's routing sidecar", LATER),
    Router("examples/router, pull", LATER),
    Router("examples/router, push", BOTH),
    Router("examples/router-go, pull", LATER),
    Router("examples/router-go, push", BOTH),
)
NAMES = tuple(router.name for router in ROUTERS)
