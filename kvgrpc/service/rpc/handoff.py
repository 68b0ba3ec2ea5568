"""HandoffService: hands blocks over, pulls and pushes them."""

from dataclasses import replace

from kvgrpc.service.lead import Lead
from kvgrpc.service.methods import FINISHED_BLOCKS, PULL_BLOCKS, REGISTER_PUSH, RESERVE_BLOCKS, ask, reply_of, reply_to
from kvgrpc.service.rpc.method import unary
from kvgrpc.service.rpc.waits import wait_after, waited
from kvgrpc.v1 import handoff_pb2, handoff_pb2_grpc
from kvgrpc.wire.values import claims_of


class HandoffService(handoff_pb2_grpc.HandoffServiceServicer):
    """Checks the addresses that a request names, asks the node, and waits for the transfer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def FinishedBlocks(
        self, request: handoff_pb2.FinishedBlocksRequest, trace: str
    ) -> handoff_pb2.FinishedBlocksResponse:
        return await reply_to(FINISHED_BLOCKS, self._lead, request, trace)

    @unary
    async def PullBlocks(self, request: handoff_pb2.PullBlocksRequest, trace: str) -> handoff_pb2.PullBlocksResponse:
        lead = self._lead
        wait = wait_after(request, lead, "destination")
        if request.HasField("grant"):
            lead.check_dial(claims_of(request.grant).address)
        header, answer = await ask(PULL_BLOCKS, lead, request, trace)
        transfer, met = await waited(wait, answer.transfer, request.ByteSize(), lead, header)
        reply = reply_of(PULL_BLOCKS, lead, header, replace(answer, transfer=transfer))
        reply.condition_met = met
        return reply

    @unary
    async def ReserveBlocks(
        self, request: handoff_pb2.ReserveBlocksRequest, trace: str
    ) -> handoff_pb2.ReserveBlocksResponse:
        lead = self._lead
        wait = wait_after(request, lead, "source")
        if request.source.address:
            lead.check_dial(request.source.address)
        header, answer = await ask(RESERVE_BLOCKS, lead, request, trace)
        transfer, met = await waited(wait, answer.transfer, request.ByteSize(), lead, header)
        reply = reply_of(RESERVE_BLOCKS, lead, header, replace(answer, transfer=transfer))
        reply.condition_met = met
        return reply

    @unary
    async def RegisterPush(
        self, request: handoff_pb2.RegisterPushRequest, trace: str
    ) -> handoff_pb2.RegisterPushResponse:
        lead = self._lead
        lead.check_dial(claims_of(request.grant).address)
        return await reply_to(REGISTER_PUSH, lead, request, trace)
