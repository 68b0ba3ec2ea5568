"""A router that drives a pull between two servers, to be killed or stopped: `router P_ADDRESS D_ADDRESS`.

Says each step that it has reached, on a line, and goes on when it is sent one. All the time it renews the lease and
the allocations, and watches both servers without reading what they say.
"""

import sys
import threading

from kvgrpc.v1 import handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from tests.service.api import Api
from tests.service.engines import into, wait_until
from tests.service.values import content, dur, group, ids_of, new_key, prompt

STEPS = ("handed over", "waiting for blocks", "bytes on their way", "over")
COUNT = 16
TOKENS = prompt(COUNT * 16)
TTL_S = 3.0


def reached(step: str) -> None:
    print(step, flush=True)  # noqa: T201 - for whoever started it
    sys.stdin.readline()


def allocate(api: Api) -> pool_pb2.AllocateBlocksResponse:
    counts = [pool_pb2.GroupCount(count=COUNT)]
    return api.pool.AllocateBlocks(pool_pb2.AllocateBlocksRequest(counts=counts, ttl=dur(TTL_S)))


def main() -> None:
    source, destination = (Api(address) for address in sys.argv[1:])
    mine, theirs = allocate(source), allocate(destination)
    watches = [api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest()) for api in (source, destination)]
    handed = source.handoff.FinishedBlocks(
        handoff_pb2.FinishedBlocksRequest(
            transfer_key=new_key(), last=True, content=content(TOKENS), blocks=[group(ids_of(mine.blocks))],
            ttl=dur(TTL_S),
        )
    )  # fmt: skip
    over = threading.Event()

    def renew() -> None:
        lease = lease_pb2.RenewLeasesRequest(
            leases=[lease_pb2.LeaseRef(lease_id=handed.lease.lease_id)], ttl=dur(TTL_S)
        )
        while not over.wait(TTL_S / 4):
            source.leases.RenewLeases(lease)
            for api, made in ((source, mine), (destination, theirs)):
                again = pool_pb2.AllocateBlocksRequest(allocation_id=made.allocation_id, ttl=dur(TTL_S))
                api.pool.AllocateBlocks(again)

    threading.Thread(target=renew, daemon=True).start()
    reached("handed over")
    request = handoff_pb2.PullBlocksRequest(grant=handed.grant, content=content(TOKENS))
    pulled = destination.handoff.PullBlocks(request).transfer.transfer_id

    def now() -> transfer_pb2.Transfer:
        return destination.transfers.GetTransfer(transfer_pb2.GetTransferRequest(transfer_id=pulled)).transfer

    wait_until(lambda: now().waiting_for == "blocks")
    reached("waiting for blocks")
    given = handoff_pb2.PullBlocksRequest(transfer_id=pulled, destination=into(ids_of(theirs.blocks)))
    destination.handoff.PullBlocks(given)
    wait_until(lambda: now().phases[-1].name == "wire")
    reached("bytes on their way")
    destination.transfers.WaitTransfer(transfer_pb2.WaitTransferRequest(transfer_id=pulled))
    reached("over")
    over.set()
    for watch in watches:
        watch.cancel()


if __name__ == "__main__":
    main()
