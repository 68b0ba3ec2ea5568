"""A router that drives a transfer between two servers, to be killed, stopped or cut off: `router P D MODE`, addresses
and a mode of STEPS.

Says each step that it has reached, on a line, and goes on when it is sent one. All the time it renews the lease and
the allocations, and watches both servers without reading what they say. It says REFUSED when a renewal is.
"""

import sys
import threading
from typing import Any, Protocol

import grpc

from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from tests.service.api import Api
from tests.service.engines import into, wait_until
from tests.service.values import content, dur, group, ids_of, new_key, prompt

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
    print(line, flush=True)  # noqa: T201 - for whoever started it


def reached(step: str) -> None:
    say(step)
    sys.stdin.readline()


class Router:
    """What it has, and renews."""

    def __init__(self, source: Api, destination: Api) -> None:
        self.source, self.destination = source, destination
        self.over = threading.Event()
        self._allocations: list[tuple[Api, str]] = []
        self._lease_id = ""
        self.mine, self.theirs = self._allocate(source), self._allocate(destination)
        watch = transfer_pb2.WatchTransfersRequest()
        self.watches = [api.transfers.WatchTransfers(watch) for api in (source, destination)]
        threading.Thread(target=self._renew, daemon=True).start()

    def finish(self, key: bytes, blocks: list[int], **fields: Any) -> handoff_pb2.FinishedBlocksResponse:
        request = handoff_pb2.FinishedBlocksRequest(
            transfer_key=key, content=content(TOKENS), blocks=[group(blocks)], ttl=dur(TTL_S), **fields
        )
        made = self.source.handoff.FinishedBlocks(request)
        self._lease_id = made.lease.lease_id
        return made

    def received(self, transfer_id: str) -> transfer_pb2.Transfer:
        request = transfer_pb2.GetTransferRequest(transfer_id=transfer_id)
        return self.destination.transfers.GetTransfer(request).transfer

    def end(self, transfer_id: str) -> None:
        """Sees a transfer to its end, from the middle of its bytes."""
        wait_until(lambda: self._moves(transfer_id), what=lambda: self.received(transfer_id))
        reached(MIDWAY)
        self.destination.transfers.WaitTransfer(transfer_pb2.WaitTransferRequest(transfer_id=transfer_id))
        reached("over")
        self.over.set()
        for watch in self.watches:
            watch.cancel()

    def _moves(self, transfer_id: str) -> bool:
        """Fails for one that is over: it was to be met on its way."""
        found = self.received(transfer_id)
        assert found.state in (transfer_pb2.TRANSFER_STATE_PENDING, transfer_pb2.TRANSFER_STATE_ACTIVE), found
        return found.bytes > 0 and found.waiting_for == "" and "wire" in {phase.name for phase in found.phases}

    def _allocate(self, api: Api) -> list[int]:
        counts = [pool_pb2.GroupCount(count=COUNT)]
        made = api.pool.AllocateBlocks(pool_pb2.AllocateBlocksRequest(counts=counts, ttl=dur(TTL_S)))
        self._allocations.append((api, made.allocation_id))
        return ids_of(made.blocks)

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
    handed = router.finish(new_key(), router.mine, last=True)
    reached("handed over")
    request = handoff_pb2.PullBlocksRequest(grant=handed.grant, content=content(TOKENS))
    pulled = router.destination.handoff.PullBlocks(request).transfer.transfer_id
    wait_until(lambda: router.received(pulled).waiting_for == "blocks")
    reached("waiting for blocks")
    given = handoff_pb2.PullBlocksRequest(transfer_id=pulled, destination=into(router.theirs))
    router.destination.handoff.PullBlocks(given)
    router.end(pulled)


class HandOver(Protocol):
    """One of two parts."""

    def __call__(self, key: bytes, *, last: bool) -> None: ...


def _push(router: Router, hand_over: HandOver, between: str) -> None:
    key = new_key()
    reserved = router.destination.handoff.ReserveBlocks(
        handoff_pb2.ReserveBlocksRequest(transfer_key=key, blocks=[group(router.theirs)], content=content(TOKENS))
    )
    reached("reserved")
    router.source.handoff.RegisterPush(handoff_pb2.RegisterPushRequest(grant=reserved.grant))
    reached("registered")
    received = reserved.transfer.transfer_id
    hand_over(key, last=False)
    wait_until(lambda: (now := router.received(received)).waiting_for == "parts" and now.bytes_done > 0)
    reached(between)
    hand_over(key, last=True)
    router.end(received)


def push(router: Router) -> None:
    def hand_over(key: bytes, *, last: bool) -> None:
        blocks = router.mine[2:] if last else router.mine[:2]
        router.finish(key, blocks, last=last, waits_for=handoff_pb2.WAITS_FOR_REGISTRATION)

    _push(router, hand_over, "between two parts")


def layers(router: Router) -> None:
    def hand_over(key: bytes, *, last: bool) -> None:
        layer = common_pb2.LayerRange(first=int(last), count=1)
        router.finish(key, router.mine, layers=layer, last=last, waits_for=handoff_pb2.WAITS_FOR_REGISTRATION)

    _push(router, hand_over, "between two layers")


def main() -> None:
    source, destination, mode = sys.argv[1:]
    router = Router(Api(source), Api(destination))
    {"pull": pull, "push": push, "layers": layers}[mode](router)


if __name__ == "__main__":
    main()
