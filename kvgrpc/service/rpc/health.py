"""Health of a lead's services: a service is SERVING if calls to it are of use.

While a server drains, or has too much in quarantine, only HandoffService is NOT_SERVING: it starts new work. Work in
progress needs the others to its end. Without an engine, or with a wedged data path, no service is SERVING. The name
`kvgrpc.tls` tells of the TLS files alone: it is NOT_SERVING while they cannot be used as they are now.
"""

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2

from kvgrpc.service.admission import BROKEN, TAKES_WORK, admission
from kvgrpc.service.lead import Lead
from kvgrpc.tls import Tls
from kvgrpc.v1 import handoff_pb2

LOOK_S = 1.0
"""Interval between looks at admission, in seconds: no event tells that a data path wedged."""

_TAKES_WORK = handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"].full_name
_WHOLE = ""
TLS = "kvgrpc.tls"
"""Name under which health tells of the TLS files."""


class EngineFreeHealth(health.aio.HealthServicer):  # type: ignore[misc]  # the package ships no types
    """The stock asyncio servicer with the List call that it lacks: each such call would log a traceback. The types are
    in quotes, because grpcio-health-checking for protobuf 6.31 has neither them nor the call.
    """

    async def List(self, request: "health_pb2.HealthListRequest", context: Any) -> "health_pb2.HealthListResponse":
        rows = {name: health_pb2.HealthCheckResponse(status=state) for name, state in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=rows)


class Health:
    """Sets a health servicer according to admission. `services`: the names of the lead's own services."""

    def __init__(self, lead: Lead, services: tuple[str, ...], tls: Tls | None) -> None:
        self._tls = tls
        self.servicer = EngineFreeHealth()
        self._lead = lead
        self._services = (*services, _WHOLE)
        self._said: dict[str, bool] = {}
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to look at admission regularly."""
        self._watch = asyncio.create_task(self._look_on())

    async def look(self) -> None:
        """Sets the health that admission gives now."""
        now, _ = admission(self._lead)
        for name in self._services:
            serving = now in TAKES_WORK if name == _TAKES_WORK else now not in BROKEN
            await self._set(name, serving)
        if self._tls is not None:
            await self._set(TLS, not self._tls.error)

    async def stop(self) -> None:
        """Sets every service to NOT_SERVING, for good."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        for name in self._services:
            await self._set(name, False)

    async def _look_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def _set(self, name: str, serving: bool) -> None:
        if self._said.get(name) is serving:
            return
        self._said[name] = serving
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.servicer.set(name, state)
