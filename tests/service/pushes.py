"""Short ways to make the calls of a push, and to read its result."""

from collections.abc import Sequence
from typing import Any

from kvgrpc.v1 import common_pb2, handoff_pb2, transfer_pb2
from tests.service.engines import SUCCEEDED, Engine, blocks_for, wait_until
from tests.service.values import content, new_key, prompt, push_part


def reserve(
    engine: Engine, key: bytes, tokens: Sequence[int], blocks: Sequence[int], /, **fields: Any
) -> handoff_pb2.ReserveBlocksResponse:
    """Reserves blocks for a push of the whole prompt."""
    usual = {"transfer_key": key, "blocks": engine.blocks(blocks), "content": content(tokens)}
    return engine.api.handoff.ReserveBlocks(
        handoff_pb2.ReserveBlocksRequest(**engine.of_this_life({**usual, **fields}))
    )


def finish(
    engine: Engine, key: bytes, tokens: Sequence[int], blocks: Sequence[int], /, **fields: Any
) -> handoff_pb2.FinishedBlocksResponse:
    """Hands over one part of a push, by default the whole prompt."""
    usual = {
        "transfer_key": key,
        "blocks": engine.blocks(blocks) if blocks else None,
        "content": content(tokens),
        "last": True,
    }
    return engine.api.handoff.FinishedBlocks(push_part(**engine.of_this_life({**usual, **fields})))


def fail(engine: Engine, key: bytes, message: str = "") -> handoff_pb2.FinishedBlocksResponse:
    """Reports that the source cannot deliver."""
    failure = handoff_pb2.SourceFailure(message=message)
    request = handoff_pb2.FinishedBlocksRequest(transfer_key=key, failure=failure)
    return engine.api.handoff.FinishedBlocks(request)


def register(engine: Engine, grant: common_pb2.Grant, **fields: Any) -> handoff_pb2.RegisterPushResponse:
    return engine.api.handoff.RegisterPush(handoff_pb2.RegisterPushRequest(grant=grant, **fields))


def cancel_key(engine: Engine, key: bytes, message: str = "") -> transfer_pb2.CancelTransferResponse:
    request = transfer_pb2.CancelTransferRequest(transfer_key=key, message=message)
    return engine.api.transfers.CancelTransfer(request)


def reason_of(transfer: transfer_pb2.Transfer) -> str:
    """Returns why a transfer failed, as errors of calls name it."""
    return common_pb2.FailureReason.Name(transfer.failure.reason).removeprefix("FAILURE_REASON_")


def wait_active(engine: Engine, transfer_id: str) -> None:
    """Waits until bytes may move."""
    active = transfer_pb2.TRANSFER_STATE_ACTIVE
    wait_until(lambda: engine.get(transfer_id).state == active, what=lambda: engine.get(transfer_id))


def check_a_good_push(source: Engine, destination: Engine, seed: int = 99) -> None:
    """Checks that a push of a new prompt between two working engines brings its bytes and leaves nothing behind."""
    tokens, key = prompt(40, seed), new_key()
    blocks, target = source.allocate(blocks_for(40)), destination.allocate(blocks_for(40))
    written = source.write(blocks, seed)
    reserved = reserve(destination, key, tokens, target)
    register(source, reserved.grant)
    sent = finish(source, key, tokens, blocks)
    end = destination.wait(reserved.transfer.transfer_id)
    assert end.state == SUCCEEDED, end
    assert destination.read(target) == written
    assert source.wait(sent.transfer.transfer_id).state == SUCCEEDED
    source.free(blocks)
    destination.free(target)
