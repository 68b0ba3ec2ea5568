"""Pages of a list, for every RPC that lists.

A page begins after the last row of the page before, by the row's position in the list's order. The position never
changes while the row exists, so rows that come or go between two pages neither hide nor repeat another row. Every page
has the event_seq of the first: later changes may be on a page or not, and a watch from there tells them.

A page of a table that is in the list's order looks at no row behind its own. Rows of earlier pages, and rows that the
filter leaves out, are passed one by one: a call looks at each row of the table once at most.
"""

import base64
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
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
    *,
    ordered: bool = False,
) -> Page[_Made]:
    """Returns the rows that the request asks for, as messages. `ordered` says that the rows come in order of time.
    Raises InvalidRequest for a token that this list never issued, and Aborted (INCARNATION_CHANGED) for a token of
    another life.
    """
    header, of = lead.header(), type(request).__name__
    left = iter(rows)
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
        left = (row for row in left if position(row) > (token.at, token.row))
    size = min(request.page_size or PAGE_SIZE, PAGE_SIZE_MAX)
    known = sorted(_first(left, size + 1, position) if ordered else left, key=position)
    found: list[_Made] = []
    nbytes = 0
    for row in known[:size]:
        found.append(make(row))
        nbytes += found[-1].ByteSize()
        if nbytes >= PAGE_BYTES_MAX:
            break
    if len(found) == len(known):
        return Page(header, found, "")
    last = position(known[len(found) - 1])
    return Page(header, found, _PageToken(of, header.incarnation, header.event_seq, *last).text())


def _first(rows: Iterator[_Row], count: int, position: Callable[[_Row], Position]) -> list[_Row]:
    """Returns the first `count` rows, and those that follow at the time of the last."""
    found = list(islice(rows, count))
    if len(found) == count:
        at, _ = position(found[-1])
        found += takewhile(lambda row: position(row)[0] == at, rows)
    return found


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
