"""Ended requests and single tensors, and other refusals of the table. Late calls are refused for a while.

An end of the house is for all. An end of a tenant is for that tenant and for the house.
"""

from kvgrpc.core.tables.remembered import Remembered
from kvgrpc.core.tensors.descriptions import TensorId
from kvgrpc.errors import AlreadyExists, OutOfRange, PreconditionFailed, Reason, too_many

Name = bytes | TensorId
"""A request by its transfer key, or one of its tensors."""
ALL, HOUSE = "", " "
"""Scopes of an end beside a tenant: everybody, and the house alone. No tenant has such a name."""

_SAID = {Reason.TRANSFER_ENDED: "was released", Reason.CANCELLED: "was cancelled"}


class Ended(Remembered[tuple[Name, str], Reason]):
    """The end reason of each ended name: TRANSFER_ENDED or CANCELLED."""

    def end(self, name: Name, tenant: str, reason: Reason, now: float) -> None:
        """Remembers that a tenant, or the house, ended a request or a tensor."""
        for scope in (tenant, HOUSE) if tenant else (ALL,):
            self.add((name, scope), reason, now)

    def error(self, id_: TensorId, tenant: str) -> PreconditionFailed | None:
        """Returns the error for a late call of a tenant for this tensor, or None when neither the tensor nor its
        request has ended for that tenant.
        """
        names: tuple[Name, ...] = (id_.key, id_)
        for name in names:
            for scope in (ALL, tenant or HOUSE):
                reason = self.get((name, scope))
                if reason is not None:
                    return too_late(id_, name, reason)
        return None

    def check(self, id_: TensorId, tenant: str) -> None:
        """Raises PreconditionFailed for a late call, as `error` says."""
        if self and (error := self.error(id_, tenant)) is not None:
            raise error


def too_late(id_: TensorId, name: Name, reason: Reason) -> PreconditionFailed:
    """Returns the error for a tensor that ended by itself or with its request."""
    what = "its request" if name == id_.key else f"tensor {id_.name} part {id_.part}"
    return PreconditionFailed(reason, f"{what} {_SAID[reason]}")


OF_PAIR = frozenset({Reason.NO_DATA_PATH, Reason.INCOMPATIBLE_POOLS})
"""Reasons for which two stores cannot exchange a tensor: another try between them ends the same way."""


def taken(id_: TensorId, why: str) -> AlreadyExists:
    """Returns the error for a name that another tensor has."""
    return AlreadyExists(Reason.TRANSFER_EXISTS, f"tensor {id_.name} part {id_.part} {why}")


def too_large(pages: int, most: int) -> OutOfRange:
    """Returns the error for a tensor that takes more pages than the store has."""
    return too_many(f"the tensor takes {pages} pages; the store has {most}: put it in several parts", most)
