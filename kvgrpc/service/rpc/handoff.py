"""HandoffService: hands blocks over, pulls and pushes them."""

from kvgrpc.core import actions
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.method import unary
from kvgrpc.service.rpc.waits import wait_after, waited
from kvgrpc.v1 import handoff_pb2, handoff_pb2_grpc
from kvgrpc.wire import answers, requests
from kvgrpc.wire.values import claims_of, grant


class HandoffService(handoff_pb2_grpc.HandoffServiceServicer):
    """Converts a request, asks the node, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def FinishedBlocks(
        self, request: handoff_pb2.FinishedBlocksRequest, trace: str
    ) -> handoff_pb2.FinishedBlocksResponse:
        lead = self._lead
        if request.WhichOneof("job") == "failure":
            return await self._give_up(request, trace)
        if request.WhichOneof("job") == "expected":
            return await self._expect(request, trace)
        header, answer = await lead.ask(
            actions.HandedOver,
            "FinishedBlocks",
            request,
            trace,
            lambda call: requests.finished_blocks(request, call, lead.weights, lead.block_limit),
        )
        return handoff_pb2.FinishedBlocksResponse(
            header=header,
            lease=answers.lease(answer.lease, header.incarnation),
            transfer=answers.transfer(answer.transfer, lead.runner.now) if answer.transfer else None,
            grant=grant(answer.token) if answer.token else None,
        )

    async def _give_up(
        self, request: handoff_pb2.FinishedBlocksRequest, trace: str
    ) -> handoff_pb2.FinishedBlocksResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.GaveUp,
            "FinishedBlocks",
            request,
            trace,
            lambda call: requests.finished_blocks(request, call, lead.weights, lead.block_limit),
        )
        transfer = answers.transfer(answer.transfer, lead.runner.now) if answer.transfer else None
        return handoff_pb2.FinishedBlocksResponse(header=header, transfer=transfer)

    async def _expect(
        self, request: handoff_pb2.FinishedBlocksRequest, trace: str
    ) -> handoff_pb2.FinishedBlocksResponse:
        lead = self._lead
        header, _ = await lead.ask(
            actions.Expected,
            "FinishedBlocks",
            request,
            trace,
            lambda call: requests.finished_blocks(request, call, lead.weights, lead.block_limit),
        )
        return handoff_pb2.FinishedBlocksResponse(header=header)

    @unary
    async def PullBlocks(self, request: handoff_pb2.PullBlocksRequest, trace: str) -> handoff_pb2.PullBlocksResponse:
        lead = self._lead
        wait = wait_after(request, lead, "destination")
        if request.HasField("grant"):
            lead.check_dial(claims_of(request.grant).address)
        header, answer = await lead.ask(
            actions.Pulling,
            "PullBlocks",
            request,
            trace,
            lambda call: requests.pull_blocks(request, call, lead.weights, lead.block_limit),
        )
        transfer, met = await waited(wait, answer.transfer, request.ByteSize(), lead, header)
        return handoff_pb2.PullBlocksResponse(
            header=header,
            transfer=answers.transfer(transfer, lead.runner.now) if transfer else None,
            condition_met=met,
        )

    @unary
    async def ReserveBlocks(
        self, request: handoff_pb2.ReserveBlocksRequest, trace: str
    ) -> handoff_pb2.ReserveBlocksResponse:
        lead = self._lead
        wait = wait_after(request, lead, "source")
        if request.source.address:
            lead.check_dial(request.source.address)
        header, answer = await lead.ask(
            actions.Reserved,
            "ReserveBlocks",
            request,
            trace,
            lambda call: requests.reserve_blocks(request, call, lead.weights, lead.block_limit),
        )
        transfer, met = await waited(wait, answer.transfer, request.ByteSize(), lead, header)
        return handoff_pb2.ReserveBlocksResponse(
            header=header,
            transfer=answers.transfer(transfer, lead.runner.now) if transfer else None,
            grant=grant(answer.token) if answer.token else None,
            condition_met=met,
        )

    @unary
    async def RegisterPush(
        self, request: handoff_pb2.RegisterPushRequest, trace: str
    ) -> handoff_pb2.RegisterPushResponse:
        lead = self._lead
        lead.check_dial(claims_of(request.grant).address)
        header, answer = await lead.ask(
            actions.Registered, "RegisterPush", request, trace, lambda call: requests.register_push(request, call)
        )
        return handoff_pb2.RegisterPushResponse(
            header=header,
            transfer=answers.transfer(answer.transfer, lead.runner.now) if answer.transfer else None,
        )
