"""A lead into whose blocks a peer writes."""

from typing import Any

from kvgrpc.core import events
from kvgrpc.core.node import Node
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.transfers import Disposition
from kvgrpc.core.values.limits import Limits
from tests.core.nodes import SECRET, Lead, access_id, content, describe, key_of, lists


class Written(Lead):
    """A destination, and a source that may write into its blocks for a push that was cancelled."""

    def __init__(self, ranks: int = 1, *, sets_aside: bool = True, **limits: Any) -> None:
        super().__init__(describe("d", 2, world_size=ranks))
        self.node = Node(Limits(**limits))
        self.feed(events.LifeBegan(2, SECRET, describe("d", 2, world_size=ranks), True, sets_aside))
        self.peer = describe("p", 1, world_size=ranks)
        self.admit(self.peer)
        self.transfer_id = ""

    def push(self, *blocks: int, number: int = 10) -> None:
        """Lets the source open an access for writing, and then cancels the push."""
        key = access_id(number) * 2
        asked = lambda c: events.ReserveBlocks(c, key, lists(blocks), content=content(16 * len(blocks)))
        reserved = self.call(asked)
        self.transfer_id = reserved.transfer.id
        (row,) = self.opened(self.peer, self.opening(reserved.token, len(blocks), number))
        assert isinstance(row, events.Opened)
        self.call(lambda c: events.CancelTransfer(c, self.transfer_id))
        assert self.memory() is Disposition.QUARANTINED

    def opening(self, token: bytes, blocks: int, number: int) -> AccessOpening:
        return AccessOpening(
            access_id(number), token, None, "t-p", "r", ("loopback",), b"", content(16 * blocks), 0, ()
        )

    def memory(self) -> Disposition:
        return self.transfer(self.transfer_id).memory

    def release(self, **fields: Any) -> int:
        """Calls ReleaseQuarantine, and returns the call's number."""
        return self.ask(lambda c: events.ReleaseQuarantine(c, **fields), "operator")

    def exit(self, rank: int = 0, *, drained: bool = True, life: str = "") -> None:
        self.feed(events.ProcessEnded(rank, life or key_of(self.peer), drained, rank))

    def rekeyed(self, rank: int = 0, message: str = "") -> None:
        self.feed(events.Rekeyed(rank, message))
