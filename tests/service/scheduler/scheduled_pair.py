"""Two servers with a scheduler each, and the end state of their requests."""

from kvgrpc.v1 import common_pb2, scheduler_pb2, transfer_pb2
from tests.service.engines import Engine, wait_until
from tests.service.scheduler.schedulers import Scheduler, new_id

PREFILL = scheduler_pb2.KvGift()
Pair = tuple[Scheduler, Scheduler]


def at_rest(*schedulers: Scheduler) -> None:
    """Waits until no block is pinned."""
    wait_until(lambda: not any(one.engine.pins() for one in schedulers))


def pushed_by(p: Scheduler) -> scheduler_pb2.PushOffer:
    return scheduler_pb2.PushOffer(source=common_pb2.PeerAddress(address=p.engine.address))


def pending(scheduler: Scheduler, id_: str) -> list[transfer_pb2.Transfer]:
    """Returns the transfers of a request that are not over."""
    over = (transfer_pb2.TRANSFER_STATE_PENDING, transfer_pb2.TRANSFER_STATE_ACTIVE)
    return [row for row in transfers(scheduler.engine) if row.request_id == id_ and row.state in over]


def group_runs(ids: list[int]) -> common_pb2.GroupBlocks:
    """Returns ids as one run, the way a server writes them."""
    return common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=ids[:1], counts=[len(ids)]))


def transfers(engine: Engine) -> list[transfer_pb2.Transfer]:
    return list(engine.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest()).transfers)


def lost(scheduler: Scheduler, grant: common_pb2.Grant) -> str:
    """Sends a request that is told at once that it takes nothing. Returns its id."""
    scheduler.arrived(id_ := new_id(), None, offer=grant)
    return id_
