"""Ended requests and single tensors. Late calls for them are refused for a while."""

from kvgrpc.core.tables.remembered import Remembered
from kvgrpc.core.tensors.descriptions import TensorId
from kvgrpc.errors import PreconditionFailed, Reason

Name = bytes | TensorId
"""A request by its transfer key, or one of its tensors."""

_SAID = {
    Reason.TRANSFER_ENDED: "was released",
    Reason.CANCELLED: "was cancelled",
}


class Ended(Remembered[Name, Reason]):
    """The end reason of each ended name: TRANSFER_ENDED or CANCELLED."""

    def error(self, id_: TensorId) -> PreconditionFailed | None:
        """Returns the error for a late call for this tensor, or None when neither it nor its request has ended."""
        names: tuple[Name, ...] = (id_.key, id_)
        for name in names:
            reason = self.get(name)
            if reason is not None:
                return too_late(id_, name, reason)
        return None


def too_late(id_: TensorId, name: Name, reason: Reason) -> PreconditionFailed:
    """Returns the error for a tensor that ended by itself or with its request."""
    what = "its request" if name == id_.key else f"tensor {id_.name} part {id_.part}"
    return PreconditionFailed(reason, f"{what} {_SAID[reason]}")
