"""A router that drives a transfer between two servers, and that a test kills, stops or cuts off: `router P D MODE`,
with the servers' addresses and a mode of STEPS.

It prints each step that it reaches, and continues when it reads a line. Meanwhile it renews the lease and the
allocations, and watches both servers without reading the streams. It prints REFUSED if a renewal is refused.
"""

import sys
import threading
from typing import Any, Protocol

import grpc

from kvgrpc.client import some_of
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from tests.service.api import Api
from tests.service.engines import wait_until
from tests.service.values import content, dur, for_readers, ids_of, new_key, prompt, push_part

MIDWAY = "bytes on their way"
STEPS = {
    "pull": ("handed over", "waiting for blocks", MIDWAY, "over"),
    "push": ("reserved", "registered", "between two parts", MIDWAY, "over"),
    "layers": ("reserved", "registered", "between two layers", MIDWAY, "over"),
}
REFUSED = "refused"
COUNT = 16
TOKENS = prompt(COUNT * 16)
TTL_S = 3.0


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the test reads the output


def reached(step: str) -> None:
    say(step)
    sys.stdin.readline()


class Router:
    """The router's allocations and lease, which a thread renews, and its watches."""

    def __init__(self, source: Api, destination: Api) -> None:
        self.source, self.destination = source, destination
        self.over = threading.Event()
        self._allocations: list[tuple[Api, str]] = []
        self._lease_id = ""
        self.mine, self.theirs = self._allocate(source), self._allocate(destination)
        watch = transfer_pb2.WatchTransfersRequest()
        self.watches = [api.transfers.WatchTransfers(watch) for api in (source, destination)]
        threading.Thread(target=self._renew, daemon=True).start()

    def hand_over(self) -> handoff_pb2.FinishedBlocksResponse:
        """Hands over all blocks, to any puller."""
        return self._finish(
            for_readers(transfer_key=new_key(), content=content(TOKENS), blocks=self.mine, ttl=dur(TTL_S))
        )

    def part(self, key: bytes, blocks: slice, **fields: Any) -> handoff_pb2.FinishedBlocksResponse:
        """Hands over some blocks as a part of a push."""
        some = some_of(self.mine, ids_of(self.mine)[blocks])
        return self._finish(push_part(transfer_key=key, content=content(TOKENS), blocks=some, ttl=dur(TTL_S), **fields))

    def _finish(self, request: handoff_pb2.FinishedBlocksRequest) -> handoff_pb2.FinishedBlocksResponse:
        made = self.source.handoff.FinishedBlocks(request)
        self._lease_id = made.lease.lease_id
        return made

    def received(self, transfer_id: str) -> transfer_pb2.Transfer:
        request = transfer_pb2.GetTransferRequest(transfer_id=transfer_id)
        return self.destination.transfers.GetTransfer(request).transfer

    def end(self, transfer_id: str) -> None:
        """Follows a transfer from the middle of its bytes to its end."""
        wait_until(lambda: self._moves(transfer_id), what=lambda: self.received(transfer_id))
        reached(MIDWAY)
        self.destination.transfers.WaitTransfer(transfer_pb2.WaitTransferRequest(transfer_id=transfer_id))
        reached("over")
        self.over.set()
        for watch in self.watches:
            watch.cancel()

    def _moves(self, transfer_id: str) -> bool:
        """Checks that bytes of the transfer are moving. Fails if it is over: the test must meet it under way."""
        found = self.received(transfer_id)
        assert found.state in (transfer_pb2.TRANSFER_STATE_PENDING, transfer_pb2.TRANSFER_STATE_ACTIVE), found
        wired = common_pb2.TRANSFER_PHASE_WIRE in {timing.phase for timing in found.phases}
        return found.total_bytes > 0 and not found.waiting_for and wired

    def _allocate(self, api: Api) -> common_pb2.Blocks:
        counts = [pool_pb2.GroupBlockCount(block_count=COUNT)]
        made = api.pool.AllocateBlocks(pool_pb2.AllocateBlocksRequest(group_block_counts=counts, ttl=dur(TTL_S)))
        self._allocations.append((api, made.blocks.allocation_id))
        return made.blocks

    def _renew(self) -> None:
        try:
            while not self.over.wait(TTL_S / 4):
                if self._lease_id:
                    lease = lease_pb2.LeaseRef(lease_id=self._lease_id)
                    self.source.leases.RenewLeases(lease_pb2.RenewLeasesRequest(leases=[lease], ttl=dur(TTL_S)))
                for api, allocation in self._allocations:
                    again = pool_pb2.AllocateBlocksRequest(allocation_id=allocation, ttl=dur(TTL_S))
                    api.pool.AllocateBlocks(again)
        except grpc.RpcError:
            say(REFUSED)


def pull(router: Router) -> None:
    handed = router.hand_over()
    reached("handed over")
    request = handoff_pb2.PullBlocksRequest(grant=handed.grant, content=content(TOKENS))
    pulled = router.destination.handoff.PullBlocks(request).transfer.transfer_id
    wait_until(lambda: router.received(pulled).waiting_for == transfer_pb2.WAITING_FOR_BLOCKS)
    reached("waiting for blocks")
    given = handoff_pb2.PullBlocksRequest(
        transfer_id=pulled, destination=handoff_pb2.PullDestination(blocks=router.theirs)
    )
    router.destination.handoff.PullBlocks(given)
    router.end(pulled)


class HandOver(Protocol):
    """Hands over one of two parts."""

    def __call__(self, key: bytes, *, last: bool) -> None: ...


def _push(router: Router, hand_over: HandOver, between: str) -> None:
    key = new_key()
    reserved = router.destination.handoff.ReserveBlocks(
        handoff_pb2.ReserveBlocksRequest(transfer_key=key, blocks=router.theirs, content=content(TOKENS))
    )
    reached("reserved")
    router.source.handoff.RegisterPush(handoff_pb2.RegisterPushRequest(grant=reserved.grant))
    reached("registered")
    received = reserved.transfer.transfer_id
    hand_over(key, last=False)
    parts = transfer_pb2.WAITING_FOR_PARTS
    wait_until(lambda: (now := router.received(received)).waiting_for == parts and now.moved_bytes > 0)
    reached(between)
    hand_over(key, last=True)
    router.end(received)


def push(router: Router) -> None:
    def hand_over(key: bytes, *, last: bool) -> None:
        router.part(key, slice(2, None) if last else slice(2), last=last)

    _push(router, hand_over, "between two parts")


def layers(router: Router) -> None:
    def hand_over(key: bytes, *, last: bool) -> None:
        layer = common_pb2.LayerRange(first=int(last), count=1)
        router.part(key, slice(None), layers=layer, last=last)

    _push(router, hand_over, "between two layers")


def main() -> None:
    source, destination, mode = sys.argv[1:]
    router = Router(Api(source), Api(destination))
    {"pull": pull, "push": push, "layers": layers}[mode](router)


if __name__ == "__main__":
    main()
