"""The staging store of one life of the engine: its table, and the parts that do the table's work."""

from dataclasses import dataclass, field

from kvgrpc.core.tensors.rows import Tensor, TensorOffer
from kvgrpc.core.tensors.table import TensorTable
from kvgrpc.service.tensors.fetcher import SourceFetcher
from kvgrpc.service.tensors.kept_tensors import KeptTensors
from kvgrpc.service.tensors.life import Life
from kvgrpc.service.tensors.pages import StorePages
from kvgrpc.service.tensors.sender import TensorSender
from kvgrpc.service.tensors.waiting_calls import WaitingCalls


@dataclass(frozen=True)
class StoreStatus:
    """Numbers of a store: what it holds, and who waits."""

    page_bytes: int
    page_count: int
    used_page_count: int
    spill_page_count: int
    used_spill_page_count: int
    tensor_count: int
    offered_count: int
    waiting_count: int
    reserved_page_count: int
    """Number of pages that only tensors get which the engine waits for."""
    queued_count: int
    """Number of requests for pages that wait for their turn."""


@dataclass(eq=False)
class Store:
    """The store of one life."""

    life: Life
    pages: StorePages
    waiting: WaitingCalls
    kept: KeptTensors
    sender: TensorSender
    fetcher: SourceFetcher
    table: TensorTable = field(init=False)

    def __post_init__(self) -> None:
        self.table = self.life.table

    def rows(self) -> list[Tensor | TensorOffer]:
        """Returns the tensors that are here, and those kept for others."""
        return [*self.table.tensors.values(), *self.table.offers.values()]

    def status(self) -> StoreStatus:
        """Returns the numbers of this moment."""
        table, line = self.table, self.pages.line
        return StoreStatus(
            page_bytes=table.page_bytes,
            page_count=table.store_pages,
            used_page_count=table.store_pages - self.life.transfers.free_pages(),
            spill_page_count=table.limits.spill_pages,
            used_spill_page_count=table.spill_pages.used,
            tensor_count=len(table.tensors),
            offered_count=len(table.offers),
            waiting_count=len(table.waits),
            reserved_page_count=line.reserved,
            queued_count=len(line),
        )
