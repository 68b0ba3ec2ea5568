"""The names and content of a request's transfers, as its scheduler states them."""

from abc import ABC, abstractmethod
from dataclasses import field
from typing import Any, Generic, TypeVar

from kvgrpc.core.policy.request import without_backoff
from kvgrpc.core.policy.values import Arrival, Give, ModeChoice, Rules, Take
from kvgrpc.core.values.grants import AccessKind, Claims, OnAbort, read_claims
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.request_times import heard
from kvgrpc.errors import PreconditionFailed, Reason

Name = TypeVar("Name")


@dataclass(frozen=True)
class Offer:
    """KV that a READ grant offers."""

    grant: bytes


@dataclass(frozen=True)
class Source:
    """The engine that will push KV; empty if a router takes the grant of `ReservedAt` to it."""

    address: str = ""
    engine_id: str = ""
    """The engine that must answer there; empty: any."""
    keep: bool = False
    """See `Take.keep`."""


@dataclass(frozen=True)
class RequestSpec(ABC, Generic[Name]):
    """A request, except for the form of its prompt, which is the shell's. `Name`: the type that names KV."""

    request_id: str
    prompt: Any = None
    """The prompt; empty or None if it has no token ids."""
    transfer_key: bytes = b""
    """The key of a push, or of given KV; a pull has the key of its grant."""
    take: Offer | Source | None = None
    give: Give | None = None
    target: bytes = b""
    """The WRITE grant of a push's destination, if a router brought it."""
    label: str = ""
    """The LLM request's id in traces and lists; empty: `request_id`."""
    consumers: int = 1
    on_abort: OnAbort = OnAbort.RELEASE
    ttl_s: float | None = None
    firm_ttl_s: float | None = None
    priority: int = 0
    request_time_us: int = field(default=0, compare=False)
    """See `began_at`; 0: the time of the hand-over, and for a pull the time of the request that handed over."""
    needs_all_outputs: bool = False
    traceparent: str = field(default="", compare=False)

    @property
    @abstractmethod
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; 0 if the prompt has no token ids."""

    @abstractmethod
    def first(self, tokens: int) -> Name:
        """Returns the name of the prompt's first `tokens` tokens. Raises KVGrpcError if they have no name."""

    @property
    def offer(self) -> Offer:
        assert isinstance(self.take, Offer), "a pull takes what a grant offers"
        return self.take

    @property
    def source(self) -> Source:
        assert isinstance(self.take, Source), "a reservation waits for a source"
        return self.take

    @property
    def kept_s(self) -> float | None:
        """Firm time of given KV, in seconds; None: the default. An offer to a next turn is soft: it may never come."""
        waits = self.give is not None and not self.give.prefill
        return 0.0 if waits and self.firm_ttl_s is None else self.firm_ttl_s

    @property
    def whole_units(self) -> bool:
        return False

    def arrival(self, rules: Rules) -> Arrival:
        """Returns the request as the policy takes it. Raises InvalidRequest (GRANT_INVALID) for an invalid grant or a
        key of a wrong length, PreconditionFailed (GRANT_WRONG_ACCESS) for a grant of the other kind.
        """
        take = None
        match self.take:
            case Offer(grant):
                take = Take(ModeChoice.PULL, claims_of(grant, AccessKind.READ).token_count)
            case Source():
                take = Take(ModeChoice.PUSH, without_backoff(rules, self.prompt_tokens), self.take.keep)
        if self.target:
            claims_of(self.target, AccessKind.WRITE)
        if self.give is not None or isinstance(self.take, Source):
            check_transfer_key(self.transfer_key)
        tokens, whole = self.prompt_tokens, self.whole_units
        return Arrival(self.request_id, tokens, take, self.give, self.needs_all_outputs, whole, wanted=self)


def began_at(take: Offer | Source | None, give: Give | None, stated_us: int, arrived_us: int) -> int:
    """Returns the time when a request began, in microseconds since the Unix epoch: a decode without a stated time began
    with its prefill, as its grant says. A next turn's prefill began later than the grant that it pulls.
    """
    decodes = isinstance(take, Offer) and (give is None or not give.prefill)
    if decodes and not stated_us:
        assert isinstance(take, Offer)
        stated_us = read_claims(take.grant).request_time_us
    return heard(stated_us, arrived_us, own=False)


def claims_of(grant: bytes, access: AccessKind) -> Claims:
    """Returns a grant's claims, unverified. Raises InvalidRequest (GRANT_INVALID), PreconditionFailed
    (GRANT_WRONG_ACCESS).
    """
    claims = read_claims(grant)
    if claims.access is not access:
        raise PreconditionFailed(
            Reason.GRANT_WRONG_ACCESS, f"this is a {claims.access.name} grant; a {access.name} grant is needed here"
        )
    return claims
