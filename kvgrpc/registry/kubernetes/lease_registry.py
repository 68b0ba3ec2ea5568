"""Engines that publish themselves: each life of an engine has a Lease, which its lead renews.

A reader compares no clocks. A Lease ends when the reader has seen no renewal of it for as long as the Lease says, by
the reader's own clock, and the API server then says so, too. While the API server is down nothing ends.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from kvgrpc.fleet.entry import ENTRY_BYTES_MAX
from kvgrpc.registry.base import EntryChanged, EntryRemoved, RegistryListing, RegistryNews
from kvgrpc.registry.kubernetes.api import (
    KubernetesApi,
    KubernetesObject,
    ObjectChanged,
    ObjectNews,
    ObjectRemoved,
    ObjectsListed,
    ObjectStream,
    name_of,
)
from kvgrpc.registry.kubernetes.settings import KubernetesSettings

GROUP, LEASES = "coordination.k8s.io/v1", "leases"
ENTRY = "kvgrpc.dev/entry"
"""Annotation with the entry."""
LABEL = "kvgrpc.dev/engine"
"""Label of all Leases of engines; its value is a digest of the engine id."""
LEASE_S = 40
"""Time after which an entry goes when its lead renews it no longer, in seconds: that of Kubernetes' own nodes."""
LEASE_S_MAX = 3_600
"""Maximum of that time, in seconds, whatever a Lease says."""


@dataclass
class _Held:
    """A Lease, as it was last seen."""

    value: bytes
    renewed: str
    lasts_s: float
    ends_at: float
    told: bytes | None = None
    """Value that readers know; None: none, because it ended."""


class LeaseRegistry:
    """The entries in a namespace's Leases."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._api = KubernetesApi(settings)
        self._held: dict[str, _Held] = {}
        self._revision = 0

    async def watch(self) -> AsyncIterator[RegistryNews]:
        # Renewals were not seen meanwhile: each Lease has its whole time again.
        self._held.clear()
        while True:
            # Silence may be that of the API server. So a Lease ends with a new listing, which needs its answer.
            async with aclosing(self._until_one_is_due()) as news:
                async for one in news:
                    yield one

    async def _until_one_is_due(self) -> AsyncGenerator[RegistryNews, None]:
        stream = ObjectStream(self._api, self._api.path(GROUP, LEASES), LABEL).follow()
        reading = asyncio.ensure_future(anext(stream))
        listed = False
        try:
            while True:
                due = min((one.ends_at for one in self._held.values() if one.told is not None), default=None)
                wait_s = None if due is None or not listed else max(0.0, due - _now())
                if not (await asyncio.wait({reading}, timeout=wait_s))[0]:
                    return
                news = reading.result()
                reading = asyncio.ensure_future(anext(stream))
                listed = True
                for one in self._take(news):
                    yield one
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()  # a reader that went away hears of no break
            await stream.aclose()

    async def close(self) -> None:
        await self._api.close()

    def _take(self, news: ObjectNews) -> Iterator[RegistryNews]:
        self._revision += 1
        match news:
            case ObjectsListed():
                before, self._held = self._held, {}
                for found in news.objects:
                    self._note(found, before.get(name_of(found)))
                for one in self._held.values():
                    one.told = one.value if one.ends_at > _now() else None
                rows = ((name, one.told, self._revision) for name, one in self._held.items())
                yield RegistryListing(tuple((name, told, at) for name, told, at in rows if told is not None))
            case ObjectChanged():
                name = name_of(news.value)
                if name not in self._held and len(self._held) >= self._api.settings.objects_max:
                    return
                self._note(news.value, self._held.get(name))
                one = self._held[name]
                if one.told != one.value and one.ends_at > _now():
                    one.told = one.value
                    yield EntryChanged(name, one.value, self._revision)
            case ObjectRemoved():
                gone = self._held.pop(news.name, None)
                if gone is not None and gone.told is not None:
                    yield EntryRemoved(news.name, self._revision)

    def _note(self, found: KubernetesObject, known: _Held | None) -> None:
        head, spec = found.get("metadata") or {}, found.get("spec") or {}
        renewed, lasts_s = str(spec.get("renewTime")), spec.get("leaseDurationSeconds")
        value = str((head.get("annotations") or {}).get(ENTRY, "")).encode(errors="replace")
        value = value[: ENTRY_BYTES_MAX + 1]  # one that is too long is refused, whatever comes after
        lasts_s = float(min(lasts_s, LEASE_S_MAX)) if isinstance(lasts_s, int) and lasts_s > 0 else float(LEASE_S)
        if known is not None and (known.renewed, known.value) == (renewed, value):
            known.lasts_s = lasts_s
            self._held[name_of(found)] = known
            return
        told = None if known is None else known.told
        self._held[name_of(found)] = _Held(value, renewed, lasts_s, _now() + lasts_s, told)


def _now() -> float:
    return asyncio.get_running_loop().time()
