"""What a rank of the lead's own knows of the memory that it shares with a worker."""

from kvgrpc.core.actions import Operation
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.server import SharedRank
from tests.datapath.movers import HeldWritten


def test_shared_memory_that_a_peer_may_still_write_is_kept_when_its_rank_closes() -> None:
    path = HeldWritten()
    path.late_writes = "a write may land after its end"
    memory = SharedMemory.create(4096)
    rank = SharedRank(0, memory, [path], lambda _: None)
    rank.expect("w", open_=True, operation=Operation.WRITE)
    assert not rank.close(0.1)
    assert len(memory.as_numpy()) == 4096
