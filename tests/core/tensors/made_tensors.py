"""Tables of tensors, and tensors that arrive in them: one element type, pages of 4 KiB."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.core.tensors.descriptions import (
    ANY,
    Description,
    ExpectedTensor,
    LeadAddress,
    NamedTensor,
    Release,
    TensorId,
)
from kvgrpc.core.tensors.rows import (
    AnswerCall,
    BringBack,
    Drop,
    Purpose,
    Renew,
    Tensor,
    TensorLimits,
    TensorOffer,
    TensorWait,
    Withdraw,
)
from kvgrpc.core.tensors.table import TensorTable
from kvgrpc.core.values.owners import ANONYMOUS
from kvgrpc.errors import Reason

KEY, OTHER = b"k" * 16, b"o" * 16
PAGE = 4096


def named(name: str = "a", key: bytes = KEY, part: int = 0) -> TensorId:
    return TensorId(key, name, part)


def of_pages(pages: int = 1, **fields: Any) -> Description:
    return Description("uint8", (pages * PAGE,), pages * PAGE, **fields)


@dataclass
class Store:
    """A table of tensors whose effects are recorded at once; its clock stands still unless a test moves it."""

    table: TensorTable
    now: float = 0.0
    answers: dict[int, Any] = field(default_factory=dict)
    dropped: list[TensorId] = field(default_factory=list)
    withdrawn: list[TensorId] = field(default_factory=list)
    renewed: list[list[TensorId]] = field(default_factory=list)
    wanted_back: list[Tensor] = field(default_factory=list)
    waits: int = 0

    def take(self) -> None:
        """Takes the effects of the table, and records them."""
        effects, self.table.effects = self.table.effects, []
        for effect in effects:
            match effect:
                case AnswerCall(wait, result):
                    assert wait not in self.answers, "a call is answered once"
                    self.answers[wait] = result
                case Renew(offers):
                    self.renewed.append([offer.id for offer in offers])
                case Drop(tensor):
                    self.dropped.append(tensor.id)
                case Withdraw(offer):
                    self.withdrawn.append(offer.id)
                case BringBack(tensor):
                    self.wanted_back.append(tensor)

    def arrive(
        self, name: str = "a", pages: int = 1, ttl_s: float = 100.0, key: bytes = KEY, tenant: str = ""
    ) -> Tensor:
        row = NamedTensor(named(name, key), of_pages(pages))
        (tensor,) = self.table.arrive([row], "peer:1", ttl_s, self.now, tenant=tenant)
        self.take()
        tensor.allocation_id = f"b-{name}"
        return tensor

    def store(self, *names: str, pages: int = 1, key: bytes = KEY, tenant: str = "") -> list[Tensor]:
        """Lets tensors arrive and be stored."""
        made = [self.arrive(name, pages, key=key, tenant=tenant) for name in names]
        for tensor in made:
            self.table.stored(tensor, self.now)
        self.take()
        return made

    def ask(
        self, name: str = "a", purpose: Purpose = Purpose.GIVEN, expected: ExpectedTensor = ANY, wait_s: float = 10.0,
        *, fetches: bool = False, caller: str = ANONYMOUS, tenant: str = "", payer: str = "",
    ) -> int:  # fmt: skip
        """Makes a call that waits, and returns its number."""
        self.waits += 1
        until = self.now + wait_s
        wait = TensorWait(self.waits, named(name), purpose, until, expected, fetches, caller, payer, tenant)
        self.table.ask(wait, self.now)
        self.take()
        return self.waits

    def offer(
        self, name: str = "a", pages: int = 1, allocation: str = "b-1", to: str = "", count: int = 1, tenant: str = ""
    ) -> TensorOffer:
        consumers = (LeadAddress(to),) if to else ()
        offer = self.table.offer(
            TensorOffer(named(name), of_pages(pages), pages, allocation, consumers, self.now, count, tenant=tenant)
        )
        self.take()
        return offer

    def release(
        self, *names: str, key: bytes = KEY, reason: Reason = Reason.TRANSFER_ENDED, caller: str = ANONYMOUS,
        tenant: str = "",
    ) -> list[str]:  # fmt: skip
        asked = Release(key, tuple(named(name, key) for name in names), tenant=tenant)
        found = self.table.release(asked, reason, self.now, caller)
        self.take()
        return [id_.name for id_ in found]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.table.due(self.now)
        self.take()

    def stages(self) -> dict[str, str]:
        return {id_.name: tensor.stage.value for id_, tensor in self.table.tensors.items()}


def store(pages: int = 8, **limits: Any) -> Store:
    return Store(TensorTable(TensorLimits(**limits), pages, PAGE))


def spilling(made: Store, pages: int) -> list[Tensor]:
    """Returns the tensors that the table chooses to spill."""
    return made.table.spill(pages, made.now)


def all_spilled(made: Store, tensors: Iterable[Tensor]) -> list[str]:
    """Reports that the tensors were copied out, and returns the allocations that came free."""
    freed = [made.table.spilled(tensor, made.now) for tensor in tensors]
    made.take()
    return freed
