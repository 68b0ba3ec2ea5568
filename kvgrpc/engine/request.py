"""A request as its scheduler knows it, with all that its transfers are called and made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvgrpc.core.policy.request import without_backoff
from kvgrpc.core.policy.values import Arrival, Give, Mode, Rules, Take
from kvgrpc.core.values import grants
from kvgrpc.engine.handles import Content, check_key, content
from kvgrpc.errors import PreconditionFailed, Reason


@dataclass(frozen=True)
class Offer:
    """KV that a grant offers."""

    grant: bytes


@dataclass(frozen=True)
class Source:
    """An engine that will push KV; empty where a router tells it where to, by the grant of `ReservedAt`."""

    address: str = ""
    engine_id: str = ""
    keep: bool = False
    """See `Take.keep`."""


@dataclass(frozen=True)
class ScheduledRequest:
    """A request with all that its transfers are called and made of."""

    request_id: str
    prompt: Sequence[int] = ()
    """Token ids; empty where it has none. Kept as they are now: engines go on writing to theirs."""
    adapter: str = ""
    cache_salt: str = ""
    transfer_key: bytes = b""
    """Of what is given, or comes by push; a pull has that of its grant."""
    take: Offer | Source | None = None
    give: Give | None = None
    target: bytes = b""
    """The WRITE grant of the destination of a push, where a router brought it."""
    label: str = ""
    """The LLM request's id in traces and lists; empty: `request_id`."""
    consumers: int = 1
    on_abort: grants.OnAbort = grants.OnAbort.RELEASE
    ttl_s: float | None = None
    priority: int = 0
    traceparent: str = field(default="", compare=False)
    needs_all_outputs: bool = False

    def __post_init__(self) -> None:
        ids = self.prompt
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()  # else they would be numpy's own integers
        object.__setattr__(self, "prompt", tuple(ids))

    def arrival(self, rules: Rules) -> Arrival:
        """As the policy takes it. Raises InvalidRequest (GRANT_INVALID) for what is no grant, or for a key that is too
        short; PreconditionFailed (GRANT_WRONG_ACCESS) for a grant of the other kind.
        """
        take = None
        if isinstance(self.take, Offer):
            take = Take(Mode.PULL, _claims(self.take.grant, grants.Access.READ).token_count)
        elif isinstance(self.take, Source):
            take = Take(Mode.PUSH, without_backoff(rules, len(self.prompt)), self.take.keep)
        if self.target:
            _claims(self.target, grants.Access.WRITE)
        if self.give is not None or isinstance(self.take, Source):
            check_key(self.transfer_key)
        return Arrival(self.request_id, len(self.prompt), take, self.give, self.needs_all_outputs, wanted=self)

    def content(self, ids: Sequence[int]) -> Content:
        """What the KV of these tokens is of."""
        return content(ids, adapter=self.adapter, cache_salt=self.cache_salt)

    @property
    def taken_under(self) -> bytes:
        """The key of what it takes; empty where it takes nothing. Raises InvalidRequest (GRANT_INVALID)."""
        match self.take:
            case Offer(grant):
                return grants.read_claims(grant).transfer_key
            case Source():
                return self.transfer_key
        return b""

    @property
    def labels(self) -> dict[str, Any]:
        """What its transfers are called."""
        return {"request_id": self.label or self.request_id, "traceparent": self.traceparent}


def _claims(grant: bytes, access: grants.Access) -> grants.Claims:
    claims = grants.read_claims(grant)
    if claims.access is not access:
        raise PreconditionFailed(
            Reason.GRANT_WRONG_ACCESS, f"this is a {claims.access.name} grant; a {access.name} grant is needed here"
        )
    return claims
