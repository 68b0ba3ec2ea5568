"""Engine ids and the identities that they belong to.

An engine id belongs to the identity that first proved a life of it here. Others with that id are refused until an
operator forgets the id. Callers without a name own nothing. The table lives as long as the process.
"""

from collections import OrderedDict

from kvgrpc.core.values.owners import ANONYMOUS, name_of, tenant_of
from kvgrpc.errors import PermissionDenied, Reason
from kvgrpc.service.identity.gate import CALLER

OF_IDENTITY_MAX = 256
"""Maximum number of ids of one identity. One more forgets its oldest: an engine without a set id takes a new one at
each start.
"""


IDS_MAX = 65_536
"""Maximum number of ids in all. One more forgets the oldest of the identity that has the most."""


class EngineIds:
    """The owners of engine ids at one lead."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        """Principals by engine id."""
        self._ids: dict[str, OrderedDict[str, None]] = {}
        """Engine ids by principal, oldest first."""

    def tenant(self, engine_id: str) -> str:
        """Returns the tenant of the identity that owns an id; empty if there is none."""
        return tenant_of(self._owners.get(engine_id, ""))

    def check(self, engine_id: str) -> None:
        """Raises PermissionDenied (NOT_OWNER) if an id belongs to another identity than the served call's caller."""
        owner = self._owners.get(engine_id)
        if owner is not None and owner != CALLER.get().principal:
            raise PermissionDenied(
                Reason.NOT_OWNER, f"engine id {engine_id} belongs to another identity here; an operator may forget it"
            )

    def claim(self, engine_id: str) -> None:
        """Gives the id to the caller of the served call, if nobody has it. Raises as `check`."""
        self.check(engine_id)
        caller = CALLER.get()
        if engine_id in self._owners or caller.name == ANONYMOUS:
            return
        self._owners[engine_id] = caller.principal
        ids = self._ids.setdefault(caller.principal, OrderedDict())
        ids[engine_id] = None
        if len(ids) > OF_IDENTITY_MAX:
            self._forget_oldest(caller.principal)
        if len(self._owners) > IDS_MAX:
            self._forget_oldest(max(self._ids, key=lambda owner: len(self._ids[owner])))

    def _forget_oldest(self, principal: str) -> None:
        self.forget(next(iter(self._ids[principal])))

    def forget(self, engine_id: str) -> str:
        """Forgets the owner of an id. Returns its name; empty if there was none."""
        owner = self._owners.pop(engine_id, "")
        if owner:
            del self._ids[owner][engine_id]
            if not self._ids[owner]:
                del self._ids[owner]
        return name_of(owner)
