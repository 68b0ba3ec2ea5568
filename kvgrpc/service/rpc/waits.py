"""Waits for a transfer: one condition and one timeout, in WaitTransfer and in calls that wait for their own."""

from collections.abc import Callable

from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import invalid
from kvgrpc.service.lead import Lead
from kvgrpc.service.places import may_stand
from kvgrpc.v1 import common_pb2, handoff_pb2, transfer_pb2
from kvgrpc.wire.values import layer_range, seconds

Condition = Callable[[Transfer], bool]
Stated = transfer_pb2.WaitTransferRequest | transfer_pb2.TransferWait


@dataclass(frozen=True)
class ServedWait:
    """Condition and timeout of a wait for a transfer, in seconds."""

    met: Condition
    timeout_s: float

    async def ended(self, lead: Lead, transfer_id: str, header: common_pb2.ResponseHeader) -> tuple[Transfer, bool]:
        """Returns the transfer when the condition is met or the time is over, and whether it is met. Moves the
        event_seq of `header`, the reply's header, up to the transfer's. Raises NotFound.
        """
        found = await lead.watchers.wait(transfer_id, self.met, self.timeout_s)
        header.event_seq = max(header.event_seq, found.seq)
        return found, self.met(found)


def wait_of(stated: Stated, lead: Lead, field: str = "") -> ServedWait:
    """Returns the wait that a message states. Raises InvalidRequest, with `field` before the name of the bad field."""
    layers = layer_range(stated)
    met = ended = condition(stated.until)
    if layers is not None:
        met = lambda transfer: transfer.has_layers(*layers) or ended(transfer)
    return ServedWait(met, timeout_s(stated, lead.config.limits.wait_s, field))


def wait_after(
    request: handoff_pb2.PullBlocksRequest | handoff_pb2.ReserveBlocksRequest, lead: Lead, needs: str
) -> ServedWait | None:
    """Returns the wait that a call asks for on the transfer it makes; None: it does not wait. Raises InvalidRequest,
    also if the field `needs` is missing: without it the transfer cannot move before the call is answered.
    """
    if not request.HasField("wait"):
        return None
    if not request.HasField(needs):  # type: ignore[arg-type]
        raise invalid("wait", f"needs {needs}: without it the transfer goes on only after the answer")
    wait = wait_of(request.wait, lead, "wait.")
    return None if request.validate_only else wait


async def waited(
    wait: ServedWait | None, made: Transfer | None, nbytes: int, lead: Lead, header: common_pb2.ResponseHeader
) -> tuple[Transfer | None, bool]:
    """Waits for the transfer that a call of `nbytes` made. Returns it, and whether the condition is met; at once if too
    many calls wait. `header` as in `ServedWait.ended`. Raises NotFound.
    """
    if wait is None or made is None or not may_stand(nbytes):
        return made, False
    return await wait.ended(lead, made.id, header)


def condition(until: int) -> Condition:
    """Returns the condition that ends a wait for a transfer."""
    returned = until == transfer_pb2.WAIT_CONDITION_RETURNED
    return lambda transfer: transfer.settled if returned else transfer.over


def timeout_s(stated: Stated | transfer_pb2.WaitTransfersRequest, most_s: float, field: str = "") -> float:
    """Returns the time a wait may last, in seconds: as asked, at most `most_s`. Raises InvalidRequest."""
    asked_s = seconds(stated, "timeout")
    if asked_s is not None and asked_s < 0:
        raise invalid(f"{field}timeout", "is not negative; leave it out for the longest")
    return most_s if asked_s is None else min(asked_s, most_s)
