"""Siblings: requests that vLLM made of one, for several answers to a prompt (`n`), or for the prompts of a list.

All siblings have the `kv_transfer_params` of the original request, whose answer has those of one sibling. So one gives,
and one takes. Other answers wait until the first one goes on, and then find what came in vLLM's prefix cache. Other
prompts are computed.
"""

import os
import re
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvgrpc.core.policy.spec import Source
from kvgrpc.core.policy.values import Give, ModeChoice
from kvgrpc.core.values.ids import TRANSFER_KEY_BYTES_MIN
from kvgrpc.integrations.vllm.prompts import COMPLETE

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvgrpc.engine.scheduler import ScheduledRequest

_T = TypeVar("_T")
REMEMBERED_MAX = 1_024
"""Maximum number of families that are remembered after all their requests have left."""
_ANSWER = re.compile(r"\d+_(.+)", re.DOTALL)
"""Name of one of several answers: its number, and the name of the request."""
_PROMPT = re.compile(r"cmpl-.*-(\d+)-[0-9a-f]{8}", re.DOTALL)
"""Name of a prompt of the completions API: its number, and vLLM's own random characters."""


def family_of(request_id: str) -> str:
    """Returns the name that all answers to one prompt share; a request with one answer is a family of its own."""
    found = _ANSWER.fullmatch(request_id)
    return found[1] if found else request_id


def is_told_of(request_id: str) -> bool:
    """Returns whether vLLM's API answers with the `kv_transfer_params` of this one: of a list, with the first one's."""
    found = _PROMPT.fullmatch(family_of(request_id))
    return found is None or int(found[1]) == 0


class Siblings:
    """The siblings of one engine."""

    def __init__(self) -> None:
        self._giver: dict[str, str] = {}
        """The request that gives, by family."""
        self._members: dict[str, set[str]] = {}
        """Requests that have not left, by family."""
        self._silent: set[str] = set()
        """Prefills that give nothing: a sibling gives in their place, or their prompt is not the first of its list."""
        self._given: dict[str, dict[str, Any]] = {}
        """Answers that the router relays of what was given, by family."""
        self._takers: dict[str, ScheduledRequest] = {}
        """Requests that take, until they go on with what came."""
        self._waits_for: dict[str, str] = {}
        """Requests that wait -> the request of `_takers` that each waits for."""
        self._ended: dict[str, tuple[str, dict[str, Any]]] = {}
        """Families of several answers whose requests have all left -> the giver and its answer, the oldest first. VLLM
        may tell of an answer when all others have left.
        """
        self._took: dict[str, tuple[str, object]] = {}
        """Families of several answers -> the request that took for all, and what it took; the oldest first."""

    def gives(self, request_id: str) -> bool:
        """Returns whether a request that is to give does so: the first of its family, if its answer is shown."""
        family = family_of(request_id)
        if family in self._ended:
            self._giver[family], self._given[family] = self._ended.pop(family)
        self._members.setdefault(family, set()).add(request_id)
        gives = is_told_of(request_id) and self._giver.setdefault(family, request_id) == request_id
        if not gives:
            self._silent.add(request_id)
        return gives

    def is_silent(self, request_id: str) -> bool:
        """Returns whether a request was to give, and does not."""
        return request_id in self._silent

    def takes(self, found: "ScheduledRequest", *, cached: bool) -> bool:
        """Returns whether a request that is to take does so: not if another one takes the same for the same prompt, or
        if the KV is that of another prompt of its list. `cached`: others find what comes, and wait for it.
        """
        first = next((id_ for id_, other in self._takers.items() if _same(found, other)), "")
        if first and cached and not found.needs_all_outputs:
            self._waits_for[found.request_id] = first
        if first or not is_told_of(found.request_id):
            return False
        family, taken = family_of(found.request_id), _taken(found)
        taker, *before = self._took.get(family, ("",))
        if taker not in ("", found.request_id) and before == [taken]:
            return False
        self._takers[found.request_id] = found
        if family != found.request_id:
            _remember(self._took, family, (found.request_id, taken))
        return True

    def share(self, found: "ScheduledRequest", *, cached: bool) -> "ScheduledRequest":
        """Returns what one sibling gives and takes of what the original request wants. `cached`: see `takes`."""
        if found.give is not None and not self.gives(found.request_id):
            # A key of its own: a destination of what the other one gives does not wait for this one.
            key = os.urandom(TRANSFER_KEY_BYTES_MIN)
            found = replace(found, give=Give(ModeChoice.PULL), target=b"", transfer_key=key)
        if found.take is not None and not self.takes(found, cached=cached):
            found = replace(found, take=None)
        return found

    def waits(self, request_id: str) -> bool:
        """Returns whether what a request would find here is still to come."""
        if self._waits_for.get(request_id) in self._takers:
            return True
        self._waits_for.pop(request_id, None)
        return False

    def go_on(self, request_ids: Collection[str]) -> None:
        """Notes that requests compute: what came for them is in the prefix cache."""
        for request_id in self._takers.keys() & request_ids:
            del self._takers[request_id]

    def left(self, request: "Request", answer: dict[str, Any] | None) -> dict[str, Any] | None:
        """Forgets a request that left with this answer. Returns what its router relays: the answer of the request that
        gave in its place, if it has computed as much.
        """
        request_id = request.request_id
        if answer and self._giver.get(family_of(request_id)) == request_id:
            self._given[family_of(request_id)] = answer
        silent = self.is_silent(request_id)
        shared = self.forget(request_id)
        return answer if not silent else shared if request.status in COMPLETE else None

    def forget(self, request_id: str) -> dict[str, Any] | None:
        """Forgets a request. Returns the answer of its family; None: it gave nothing."""
        self._silent.discard(request_id)
        self._takers.pop(request_id, None)
        self._waits_for.pop(request_id, None)
        family = family_of(request_id)
        answer, members = self._given.get(family), self._members.get(family, set())
        members.discard(request_id)
        if not members:
            if answer is not None and family != request_id:
                _remember(self._ended, family, (self._giver[family], answer))
            for known in (self._members, self._giver, self._given):
                known.pop(family, None)
        return answer


def _remember(table: dict[str, _T], name: str, value: _T) -> None:
    """Sets a row, and drops the oldest one beyond the maximum."""
    table[name] = value
    if len(table) > REMEMBERED_MAX:
        del table[next(iter(table))]


def _taken(found: "ScheduledRequest") -> object:
    """Returns what a request takes: a grant names its transfer, a source needs the key beside it."""
    return (found.take, found.transfer_key) if isinstance(found.take, Source) else found.take


def _same(one: "ScheduledRequest", other: "ScheduledRequest") -> bool:
    """Returns whether two requests take the same, for the same prompt."""
    named = one.prompt, one.adapter, one.cache_salt, one.items
    return _taken(one) == _taken(other) and named == (other.prompt, other.adapter, other.cache_salt, other.items)
