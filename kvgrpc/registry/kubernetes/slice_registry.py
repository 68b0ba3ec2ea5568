"""Engines behind Services: the EndpointSlices say who is ready, and each lead says which engine it is."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from kvgrpc.registry.base import RegistryNews
from kvgrpc.registry.introductions import Candidate, Introduce, IntroductionLimits, Introductions
from kvgrpc.registry.kubernetes.api import (
    KubernetesApi,
    KubernetesObject,
    ObjectChanged,
    ObjectRemoved,
    ObjectsListed,
    ObjectStream,
    name_of,
)
from kvgrpc.registry.kubernetes.settings import KubernetesSettings
from kvgrpc.registry.kubernetes.slices import candidates

GROUP, SLICES = "discovery.k8s.io/v1", "endpointslices"


@dataclass(frozen=True)
class SliceChoice:
    """Choice of the slices that count, and of the way in which a lead is called."""

    selector: str
    """Labels of the Services, such as app.kubernetes.io/name=kvgrpc. Kubernetes copies them to the slices."""
    port: str = "grpc"
    """Name of the leads' port."""
    domain: str = ""
    """Domain of namespaces, such as svc, to call pods by name; empty: by address."""


class SliceRegistry:
    """The leads that Services have behind them."""

    def __init__(
        self,
        settings: KubernetesSettings,
        choice: SliceChoice,
        introduce: Introduce,
        limits: IntroductionLimits | None = None,
    ) -> None:
        self._api = KubernetesApi(settings)
        self._choice = choice
        self._introductions = Introductions(introduce, limits)

    def watch(self) -> AsyncIterator[RegistryNews]:
        return self._introductions.watch(self._look())

    async def close(self) -> None:
        await self._api.close()

    async def _look(self) -> AsyncIterator[list[Candidate]]:
        known: dict[str, KubernetesObject] = {}
        stream = ObjectStream(self._api, self._api.path(GROUP, SLICES), self._choice.selector)
        async with aclosing(stream.follow()) as changes:
            async for news in changes:
                match news:
                    case ObjectsListed():
                        known = {name_of(one): one for one in news.objects}
                    case ObjectChanged(value):
                        if name_of(value) in known or len(known) < self._api.settings.objects_max:
                            known[name_of(value)] = value
                    case ObjectRemoved():
                        known.pop(news.name, None)
                yield candidates(known.values(), self._choice.port, self._choice.domain)
