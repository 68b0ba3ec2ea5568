"""A caller by RPC that shows the ticket of the attached engine speaks for it; other callers do not."""

import grpc
import pytest

from kvgrpc.core.values.layout import PoolKind
from kvgrpc.v1 import common_pb2, pool_pb2, scheduler_pb2, transfer_pb2
from tests.engine.conftest import Attach, Leads
from tests.engine.owners.victims import PROMPT, allocated
from tests.engine.support import new_key
from tests.service.api import read_refusal
from tests.service.values import content, for_readers, group, named_blocks


@pytest.mark.parametrize("ticket", ["00" * 32, "no hex", ""])
def test_a_ticket_of_no_engine_opens_nothing(leads: Leads, attach: Attach, ticket: str) -> None:
    attach(leads[0])
    call = leads[0].api.scheduler.MatchTokens
    with pytest.raises(grpc.RpcError) as raised:
        call(scheduler_pb2.MatchTokensRequest(request_id="r"), metadata=(("kvgrpc-ticket", ticket),))
    assert read_refusal("MatchTokens", raised.value).reason == "NOT_OWNER"


def test_who_shows_the_ticket_uses_what_the_engine_owns(leads: Leads, attach: Attach) -> None:
    side = attach(leads[0], kind=PoolKind.SERVER_MANAGED)
    allocation_id, blocks = allocated(side, 2)
    ticket = (("kvgrpc-ticket", side.engine.ticket.secret.hex()),)
    pool, handoff = leads[0].api.pool, leads[0].api.handoff
    named = named_blocks(side.engine.incarnation, group(blocks), allocation_id=allocation_id)
    handed = for_readers(transfer_key=new_key(), content=content(PROMPT), blocks=named)
    assert handoff.FinishedBlocks(handed, metadata=ticket).lease.lease_id
    freed = pool.FreeBlocks(pool_pb2.FreeBlocksRequest(allocation_id=allocation_id), metadata=ticket)
    assert not freed.freed_blocks.groups  # the lease still pins them


def test_the_end_of_a_transfer_is_acknowledged_by_its_owner_alone(leads: Leads, attach: Attach) -> None:
    side, api = attach(leads[0]), leads[0].api
    key = new_key()
    transfer_id = side.known(side.hand_over([0, 1], PROMPT, transfer_key=key))
    side.engine.cancel(key)
    side.round_trip()
    request = transfer_pb2.AcknowledgeTransfersRequest(transfer_ids=[transfer_id])
    assert api.transfers.AcknowledgeTransfers(request).acknowledged_count == 0


def test_what_is_kept_for_who_shows_the_ticket_is_in_the_engines_share(leads: Leads, attach: Attach) -> None:
    side, lead = attach(leads[0]), leads[0]
    before = lead.status().kept
    intent, gift = common_pb2.Intent(transfer_key=new_key()), scheduler_pb2.KvGift()
    side.api.scheduler.RequestArrived(
        scheduler_pb2.RequestArrivedRequest(request_id="r", prompt=content(PROMPT), give=gift, intent=intent)
    )
    kept = lead.status().kept
    assert kept.engine_bytes > before.engine_bytes
    assert kept.caller_bytes == before.caller_bytes
