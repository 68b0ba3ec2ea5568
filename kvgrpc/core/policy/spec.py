"""What a request's transfers are called and made of, as its scheduler said it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvgrpc.core.policy.request import without_backoff
from kvgrpc.core.policy.values import Arrival, Give, Mode, Rules, Take
from kvgrpc.core.values.grants import Access, Claims, OnAbort, read_claims
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.request_times import heard
from kvgrpc.errors import PreconditionFailed, Reason

Name = TypeVar("Name")


@dataclass(frozen=True)
class Offer:
    """KV that a READ grant offers."""

    grant: bytes


@dataclass(frozen=True)
class Source:
    """The engine that will push KV; empty where a router tells it where to, by the grant of `ReservedAt`."""

    address: str = ""
    engine_id: str = ""
    """The engine that must answer there; empty: any."""
    keep: bool = False
    """See `Take.keep`."""


@dataclass(frozen=True)
class RequestSpec(ABC, Generic[Name]):
    """Every field but the prompt, whose form is the shell's; `Name`: what KV is named by."""

    request_id: str
    prompt: Any = None
    """Empty, or None, where it has no token ids."""
    transfer_key: bytes = b""
    """The key of what is given, or comes by push; a pull has that of its grant."""
    take: Offer | Source | None = None
    give: Give | None = None
    target: bytes = b""
    """The WRITE grant of the destination of a push, where a router brought it."""
    label: str = ""
    """The LLM request's id in traces and lists; empty: `request_id`."""
    consumers: int = 1
    on_abort: OnAbort = OnAbort.RELEASE
    ttl_s: float | None = None
    firm_ttl_s: float | None = None
    priority: int = 0
    request_time_us: int = field(default=0, compare=False)
    """See `began_at`; 0: when it hands over, and of a pull when the request began that handed over."""
    needs_all_outputs: bool = False
    traceparent: str = field(default="", compare=False)

    @property
    @abstractmethod
    def prompt_tokens(self) -> int:
        """0 where it has no token ids."""

    @abstractmethod
    def first(self, tokens: int) -> Name:
        """What the prompt's first `tokens` tokens are named by. Raises KVGrpcError where they have no name."""

    @property
    def offer(self) -> Offer:
        """What it pulls."""
        assert isinstance(self.take, Offer), "a pull takes what a grant offers"
        return self.take

    @property
    def source(self) -> Source:
        """What pushes to it."""
        assert isinstance(self.take, Source), "a reservation waits for a source"
        return self.take

    @property
    def kept_s(self) -> float | None:
        """How long what it gives is firm; None: the default. The next turn may never come: what it offers is soft."""
        waits = self.give is not None and not self.give.prefill
        return 0.0 if waits and self.firm_ttl_s is None else self.firm_ttl_s

    @property
    def whole_units(self) -> bool:
        """See `Arrival.whole_units`."""
        return False

    def arrival(self, rules: Rules) -> Arrival:
        """Raises InvalidRequest (GRANT_INVALID) for what is no grant, or for a key of another length than the API
        allows; PreconditionFailed (GRANT_WRONG_ACCESS) for a grant of the other kind.
        """
        take = None
        match self.take:
            case Offer(grant):
                take = Take(Mode.PULL, claims_of(grant, Access.READ).token_count)
            case Source():
                take = Take(Mode.PUSH, without_backoff(rules, self.prompt_tokens), self.take.keep)
        if self.target:
            claims_of(self.target, Access.WRITE)
        if self.give is not None or isinstance(self.take, Source):
            check_transfer_key(self.transfer_key)
        tokens, whole = self.prompt_tokens, self.whole_units
        return Arrival(self.request_id, tokens, take, self.give, self.needs_all_outputs, whole, wanted=self)


def began_at(take: Offer | Source | None, give: Give | None, stated_us: int, arrived_us: int) -> int:
    """When a request began that its engine hears of at `arrived_us`: as stated, or with the prefill of what it decodes.
    A next turn, which takes what it goes on from, began later than that.
    """
    decodes = isinstance(take, Offer) and (give is None or not give.prefill)
    if decodes and not stated_us:
        assert isinstance(take, Offer)
        stated_us = read_claims(take.grant).request_time_us
    return heard(stated_us, arrived_us, own=False)


def claims_of(grant: bytes, access: Access) -> Claims:
    """What a grant of that kind says, unverified. Raises InvalidRequest (GRANT_INVALID), PreconditionFailed
    (GRANT_WRONG_ACCESS).
    """
    claims = read_claims(grant)
    if claims.access is not access:
        raise PreconditionFailed(
            Reason.GRANT_WRONG_ACCESS, f"this is a {claims.access.name} grant; a {access.name} grant is needed here"
        )
    return claims
