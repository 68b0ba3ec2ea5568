"""The Lease of a lead: made for one life of the engine, renewed while it lasts, and deleted at its end.

Its owner is the pod, so Kubernetes deletes it with the pod. A container that starts again in the same pod deletes the
Leases of its earlier lives.
"""

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime

from kvgrpc.errors import KVGrpcError
from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.registry.base import down
from kvgrpc.registry.kubernetes.api import KubernetesApi, KubernetesObject, name_of
from kvgrpc.registry.kubernetes.lease_registry import ENTRY, GROUP, LABEL, LEASE_S, LEASES
from kvgrpc.registry.kubernetes.settings import KubernetesSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseHolder:
    """The pod that a lead runs in; a lead outside of Kubernetes has none."""

    pod: str = ""
    uid: str = ""
    """Uid of the pod, which owns the Lease; empty: nothing deletes the Lease of a lead that was killed."""
    lease_s: int = LEASE_S


class LeasePublication:
    """One entry of this process, which stays in Kubernetes as long as `run` does."""

    def __init__(self, settings: KubernetesSettings, entry: EngineEntry, holder: LeaseHolder | None = None) -> None:
        self._api = KubernetesApi(settings)
        self._entry = entry
        self._holder = holder or LeaseHolder()
        self._digest = hashlib.sha256(entry.engine_id.encode()).hexdigest()[:32]
        self._name = f"kvgrpc-{self._digest}-{entry.incarnation:x}"
        self._leases = self._api.path(GROUP, LEASES)
        self._changed = asyncio.Event()
        self._alone = False
        self.published = asyncio.Event()
        """Set while Kubernetes has the entry."""
        self.failure = ""
        """Reason why Kubernetes lacks the entry; empty: it has it, or nothing was tried yet."""

    def update(self, entry: EngineEntry) -> None:
        """Publishes another value of the same life, soon."""
        self._entry = entry
        self._changed.set()

    async def run(self) -> None:
        """Publishes the entry and renews its Lease. It never ends by itself."""
        quarter = self._holder.lease_s / 4
        while True:
            self._changed.clear()
            try:
                await self._renew()
                self.failure, wait_s = "", quarter
            except KVGrpcError as error:
                self.published.clear()
                if not self.failure:  # once for each outage
                    _log.warning("this engine is not renewed in Kubernetes: %s", error)
                self.failure = str(error)
                wait_s = min(1.0, quarter)
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def withdraw(self) -> None:
        """Deletes the Lease. Without an answer its time ends it."""
        try:
            await self._api.call("DELETE", f"{self._leases}/{self._name}")
        except KVGrpcError as error:
            _log.info("the entry in Kubernetes ends with its Lease: %s", error)
        finally:
            self.published.clear()
            await self._api.close()

    async def _renew(self) -> None:
        lease = self._lease()
        status, said = await self._api.call("PATCH", f"{self._leases}/{self._name}", body=lease)
        if status == 404:
            status, said = await self._api.call("POST", self._leases, body=lease, form="application/json")
        if status not in {200, 201}:
            raise down(f"{status} {said.get('message', '')}")
        self.published.set()
        if not self._alone and self._holder.pod:
            self._alone = True
            try:
                await self._end_earlier_lives()
            except KVGrpcError as error:
                _log.warning("the Leases of earlier lives are left to end by themselves: %s", error)

    async def _end_earlier_lives(self) -> None:
        _, found = await self._api.call("GET", self._leases, {"labelSelector": f"{LABEL}={self._digest}"})
        for one in found.get("items") or []:
            holder = (one.get("spec") or {}).get("holderIdentity")
            if holder == self._holder.pod and name_of(one) != self._name:
                await self._api.call("DELETE", f"{self._leases}/{name_of(one)}")

    def _lease(self) -> KubernetesObject:
        head: KubernetesObject = {
            "name": self._name,
            "labels": {LABEL: self._digest},
            "annotations": {ENTRY: self._entry.to_json().decode()},
        }
        if self._holder.pod and self._holder.uid:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": self._holder.pod, "uid": self._holder.uid}
            head["ownerReferences"] = [owner]
        return {
            "apiVersion": GROUP,
            "kind": "Lease",
            "metadata": head,
            "spec": {
                "holderIdentity": self._holder.pod or self._entry.engine_id,
                "leaseDurationSeconds": self._holder.lease_s,
                # For people, and to tell one renewal from the next: no reader compares it with a clock.
                "renewTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            },
        }
