"""An attached engine that owns things, and RPC calls that name them without the engine's ticket.

The caller knows everything that lists show: ids, block numbers, transfer keys.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from kvgrpc.core.values.layout import PoolKind
from kvgrpc.engine import content as content_of
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, pool_pb2, scheduler_pb2, tensor_pb2, transfer_pb2
from tests.engine.conftest import Leads
from tests.engine.support import Side, new_key, tokens
from tests.engine.tensors.conftest import PAGE
from tests.service.api import Api, Refusal, read_refusal, without
from tests.service.values import content, for_readers, group, ids_of, named_blocks, push_part

PROMPT = tokens(32)
R = "a request of the engine's"
PASSING = ("event_seq", "age", "remaining", "soft_in", "cap_remaining", "uptime", "progress_age", "duration")


@dataclass(frozen=True)
class Victim:
    """An attached engine, the things it owns, and a stranger's stubs."""

    api: Api
    incarnation: int
    allocation_id: str
    """Id of the allocation of `blocks`; empty where the engine manages its pool."""
    blocks: tuple[int, ...]
    pull_id: str
    """Id of a pull that waits for its blocks."""
    grant: common_pb2.Grant
    """Grant of a lease that another engine keeps."""
    push_key: bytes
    """Transfer key of a push that has its first part."""

    def named(self, **fields: Any) -> common_pb2.Blocks:
        return named_blocks(self.incarnation, group(self.blocks[:2]), **fields)

    def guessed(self, kind: str) -> str:
        """Returns an id in the format of this life of the engine, with a wrong random part."""
        return f"{kind}-{self.incarnation:016x}-{GUESSED}"

    def guessed_lease(self) -> lease_pb2.LeaseRef:
        return lease_pb2.LeaseRef(lease_id=self.guessed("l"))

    def state(self) -> str:
        """Returns everything that lists show, without the fields that change with time."""
        api = self.api
        lists = (
            api.leases.ListLeases(lease_pb2.ListLeasesRequest()),
            api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest()),
            api.pool.GetPoolStatus(pool_pb2.GetPoolStatusRequest()),
        )
        return "\n".join(without(reply, *PASSING) for reply in lists)


Attack = Callable[[Victim], object]


def _handed(victim: Victim, **fields: Any) -> handoff_pb2.FinishedBlocksRequest:
    return for_readers(
        transfer_key=new_key(), content=content(PROMPT), blocks=victim.named(**fields), lease_id=victim.guessed("l")
    )


def _pull(victim: Victim, **fields: Any) -> handoff_pb2.PullBlocksRequest:
    target = handoff_pb2.PullDestination(blocks=victim.named(**fields))
    return handoff_pb2.PullBlocksRequest(grant=victim.grant, content=content(PROMPT), destination=target)


def _give(victim: Victim) -> object:
    target = handoff_pb2.PullDestination(blocks=victim.named())
    return victim.api.handoff.PullBlocks(handoff_pb2.PullBlocksRequest(transfer_id=victim.pull_id, destination=target))


def _grant(victim: Victim, **fields: Any) -> lease_pb2.GrantLeaseRequest:
    return lease_pb2.GrantLeaseRequest(content=content(PROMPT), blocks=victim.named(**fields))


def _reserve(victim: Victim, **fields: Any) -> handoff_pb2.ReserveBlocksRequest:
    return handoff_pb2.ReserveBlocksRequest(
        transfer_key=new_key(), content=content(PROMPT), blocks=victim.named(**fields)
    )


def _add_part(victim: Victim) -> object:
    lease_id = victim.guessed("l")
    part = push_part(transfer_key=victim.push_key, blocks=victim.named(), last=True, lease_id=lease_id)
    return victim.api.handoff.FinishedBlocks(part)


NAMING_BLOCKS: dict[str, Attack] = {
    "hands over": lambda v: v.api.handoff.FinishedBlocks(_handed(v)),
    "grants a lease on": lambda v: v.api.leases.GrantLease(_grant(v)),
    "pulls into": lambda v: v.api.handoff.PullBlocks(_pull(v)),
    "reserves": lambda v: v.api.handoff.ReserveBlocks(_reserve(v)),
    "gives to the engine's pull": _give,
    "adds to the engine's push": _add_part,
}
"""Calls that name blocks by their numbers alone."""
NAMING_AN_ALLOCATION: dict[str, Attack] = {
    "hands over": lambda v: v.api.handoff.FinishedBlocks(_handed(v, allocation_id=v.allocation_id)),
    "grants a lease on": lambda v: v.api.leases.GrantLease(_grant(v, allocation_id=v.allocation_id)),
    "pulls into": lambda v: v.api.handoff.PullBlocks(_pull(v, allocation_id=v.allocation_id)),
    "reserves": lambda v: v.api.handoff.ReserveBlocks(_reserve(v, allocation_id=v.allocation_id)),
    "frees blocks of": lambda v: v.api.pool.FreeBlocks(
        pool_pb2.FreeBlocksRequest(blocks=v.named(allocation_id=v.allocation_id))
    ),
    "frees": lambda v: v.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(allocation_id=v.allocation_id)),
    "renews": lambda v: v.api.pool.AllocateBlocks(pool_pb2.AllocateBlocksRequest(allocation_id=v.allocation_id)),
}
OF_THE_POOL: dict[str, Attack] = {
    "frees by number": lambda v: v.api.pool.FreeBlocks(pool_pb2.FreeBlocksRequest(blocks=v.named())),
}
SCHEDULING: dict[str, Attack] = {
    "RequestArrived": lambda v: v.api.scheduler.RequestArrived(
        scheduler_pb2.RequestArrivedRequest(request_id=R, prompt=content(PROMPT), give=scheduler_pb2.KvGift())
    ),
    "MatchTokens": lambda v: v.api.scheduler.MatchTokens(scheduler_pb2.MatchTokensRequest(request_id=R)),
    "BlocksAllocated": lambda v: v.api.scheduler.BlocksAllocated(
        scheduler_pb2.BlocksAllocatedRequest(request_id=R, blocks=v.named())
    ),
    "TokensComputed": lambda v: v.api.scheduler.TokensComputed(
        scheduler_pb2.TokensComputedRequest(request_id=R, blocks=v.named())
    ),
    "BlocksLoaded": lambda v: v.api.scheduler.BlocksLoaded(scheduler_pb2.BlocksLoadedRequest(request_id=R)),
    "RequestPreempted": lambda v: v.api.scheduler.RequestPreempted(scheduler_pb2.RequestPreemptedRequest(request_id=R)),
    "RequestFinished": lambda v: v.api.scheduler.RequestFinished(
        scheduler_pb2.RequestFinishedRequest(
            request_id=R, blocks=v.named(), computed_tokens=32, outcome=scheduler_pb2.REQUEST_OUTCOME_COMPLETE
        )
    ),
    "BlocksNeeded": lambda v: v.api.scheduler.BlocksNeeded(
        scheduler_pb2.BlocksNeededRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=1)])
    ),
    "AbortRequest": lambda v: v.api.scheduler.AbortRequest(scheduler_pb2.AbortRequestRequest(request_id=R)),
    "PollSchedulerNews": lambda v: v.api.scheduler.PollSchedulerNews(
        scheduler_pb2.PollSchedulerNewsRequest(after_seq=1)
    ),
    "Schedule": lambda v: v.api.step(scheduler_pb2.ScheduleRequest(after_seq=1)),
}


GUESSED = "0" * 32
"""Takes the place of an id's random part."""
GUESSING: dict[str, Attack] = {
    "looks at a lease": lambda v: v.api.leases.GetLease(lease_pb2.GetLeaseRequest(lease=v.guessed_lease())),
    "releases a lease": lambda v: v.api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=v.guessed_lease())),
    "looks at a transfer": lambda v: v.api.transfers.GetTransfer(
        transfer_pb2.GetTransferRequest(transfer_id=v.guessed("t"))
    ),
    "waits for a transfer": lambda v: v.api.transfers.WaitTransfer(
        transfer_pb2.WaitTransferRequest(transfer_id=v.guessed("t"))
    ),
    "cancels a transfer": lambda v: v.api.transfers.CancelTransfer(
        transfer_pb2.CancelTransferRequest(transfer_id=v.guessed("t"))
    ),
}
PASSED_OVER: dict[str, Attack] = {
    "frees with a cancel": lambda v: v.api.transfers.CancelTransfer(
        transfer_pb2.CancelTransferRequest(transfer_key=new_key(), free_allocation_ids=[v.allocation_id])
    ),
    "acknowledges": lambda v: v.api.transfers.AcknowledgeTransfers(
        transfer_pb2.AcknowledgeTransfersRequest(transfer_ids=[v.pull_id])
    ),
    "renews": lambda v: v.api.leases.RenewLeases(
        lease_pb2.RenewLeasesRequest(leases=[v.guessed_lease()], reading_access_ids=[new_key()], for_access=True)
    ),
    "waits for transfers": lambda v: v.api.transfers.WaitTransfers(
        transfer_pb2.WaitTransfersRequest(transfer_ids=[v.guessed("t")])
    ),
}
"""Calls that take several names, and skip those that belong to another caller."""


REASONS = {"gives to the engine's pull": "TRANSFER_NOT_FOUND", "adds to the engine's push": "TRANSFER_EXISTS"}
"""Refusal reasons of calls that also name a transfer."""


def refusal(victim: Victim, attack: Attack) -> Refusal:
    """Makes a call that must be refused and change nothing. Returns the refusal."""
    before = victim.state()
    try:
        answer = attack(victim)
    except grpc.RpcError as error:
        found = read_refusal(victim.api.last_method, error)
    else:
        raise AssertionError(f"not refused: {str(answer)[:300]}")
    assert victim.state() == before
    return found


def attached(leads: Leads, kind: PoolKind) -> Iterator[Victim]:
    p, d = leads
    with ExitStack() as stack:
        source, side = Side(p), Side(d, kind=kind)
        stack.callback(source.close)
        stack.callback(side.close)
        allocation_id, blocks = "", list(range(10))
        if kind is PoolKind.SERVER_MANAGED:
            allocation_id, blocks = allocated(side, 10)
        first, second = (source.hand_over([2 * i, 2 * i + 1], PROMPT).grant for i in range(2))
        pull = side.engine.pull(first, content_of(PROMPT))
        push_key = new_key()
        part = side.engine.push(content_of(PROMPT), transfer_key=push_key)
        part.finished(blocks[6:7])
        side.engine.flush()
        pull_id = side.known(pull)
        d.wait_for(pull_id, "blocks")
        grant, two = common_pb2.Grant(token=second), tuple(blocks[:2])
        yield Victim(d.api, side.engine.incarnation, allocation_id, two, pull_id, grant, push_key)


def allocated(side: Side, count: int) -> tuple[str, list[int]]:
    """Allocates blocks over the engine's session. Returns the allocation's id and the block ids."""
    counts = [pool_pb2.GroupBlockCount(block_count=count)]
    number = side.engine.call(allocate_blocks=pool_pb2.AllocateBlocksRequest(group_block_counts=counts))
    side.poll_until(lambda _: side.engine.answered(number))
    made = side.engine.answer(number).allocate_blocks.blocks
    return made.allocation_id, ids_of(made)


def put(api: Api, allocation_id: str, key: bytes = b"", **options: Any) -> object:
    """Puts a tensor of one page, in the pages of an allocation."""
    return api.tensors.PutTensor(
        tensor_pb2.PutTensorRequest(
            tensor=tensor_pb2.TensorName(transfer_key=key or new_key(), name="mine"),
            description=tensor_pb2.TensorDescription(dtype="uint8", shape_sizes=[PAGE], nbytes=PAGE),
            allocation_id=allocation_id,
            asynchronous=True,
        ),
        **options,
    )


EVERY_ATTACK: tuple[Attack, ...] = (
    *NAMING_BLOCKS.values(), *NAMING_AN_ALLOCATION.values(), *OF_THE_POOL.values(), *SCHEDULING.values(),
    *GUESSING.values(), *PASSED_OVER.values(), lambda v: put(v.api, v.allocation_id),
)  # fmt: skip
