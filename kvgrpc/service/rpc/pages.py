"""Pages of a list, for every RPC that lists.

A page begins after the last row of the page before, by the row's position in the list's order. The position never
changes while the row exists, so rows that come or go between two pages neither hide nor repeat another row. Every page
has the event_seq of the first: later changes may be on a page or not, and a watch from there tells them.
"""

import base64
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import Aborted, InvalidRequest, Reason, invalid
from kvgrpc.service.lead import Answerer
from kvgrpc.v1.common_pb2 import ResponseHeader

PAGE_SIZE = 100
PAGE_SIZE_MAX = 1_000
PAGE_BYTES_MAX = 1 << 20
"""Maximum size of a page's rows except the last, in bytes: some rows are long, and a page is one message."""

Position = tuple[float, str]
"""Seconds in the order of the list, then the row's own id."""

_Row = TypeVar("_Row")
_Made = TypeVar("_Made", bound=Message)


class ListRequest(Protocol):
    """A request of any RPC that lists."""

    page_size: int
    page_token: str


@dataclass(frozen=True)
class Page(Generic[_Made]):
    """One page of a list. The token is empty on the last page."""

    header: ResponseHeader
    rows: list[_Made]
    next_page_token: str


@dataclass(frozen=True)
class _PageToken:
    """The end of a page: the list, the life, the event of the first page, and the last row with its position."""

    of: str
    incarnation: int
    event_seq: int
    at: float
    row: str

    def text(self) -> str:
        parts = (self.of, str(self.incarnation), str(self.event_seq), self.at.hex(), self.row)
        return base64.urlsafe_b64encode(" ".join(parts).encode()).decode()


def page(
    lead: Answerer,
    request: ListRequest,
    rows: Iterable[_Row],
    position: Callable[[_Row], Position],
    make: Callable[[_Row], _Made],
) -> Page[_Made]:
    """Returns the rows that the request asks for, as messages. Raises InvalidRequest for a token that this list never
    issued, and Aborted (INCARNATION_CHANGED) for a token of another life.
    """
    header, of = lead.header(), type(request).__name__
    ordered = sorted(rows, key=position)
    start = 0
    if request.page_token:
        token = _read(request.page_token)
        if token.of != of:
            raise _not_ours()
        if token.incarnation != header.incarnation:
            raise Aborted(
                Reason.INCARNATION_CHANGED, "this list began in another life of this engine; list from its start"
            )
        if not 0 <= token.event_seq <= header.event_seq:
            raise _not_ours()
        header.event_seq = token.event_seq
        start = bisect_right(ordered, (token.at, token.row), key=position)
    end = start + min(request.page_size or PAGE_SIZE, PAGE_SIZE_MAX)
    found: list[_Made] = []
    nbytes = 0
    for row in ordered[start:end]:
        found.append(make(row))
        nbytes += found[-1].ByteSize()
        if nbytes >= PAGE_BYTES_MAX:
            break
    end = start + len(found)
    if end >= len(ordered):
        return Page(header, found, "")
    return Page(header, found, _PageToken(of, header.incarnation, header.event_seq, *position(ordered[end - 1])).text())


def _read(text: str) -> _PageToken:
    try:
        of, incarnation, seq, at, row = base64.urlsafe_b64decode(text).decode().split(" ", 4)
        token = _PageToken(of, int(incarnation), int(seq), float.fromhex(at), row)
    except (ValueError, OverflowError):
        raise _not_ours() from None
    if token.text() != text or not math.isfinite(token.at):
        raise _not_ours()
    return token


def _not_ours() -> InvalidRequest:
    return invalid("page_token", "take it from the last page's reply, unchanged")
