"""The gate: every call goes through it before its method hears of it.

It finds the caller's name (certificate, token), its roles and tenant (the operator's file), and lets the call go on if
a role is enough for the method. A refused call has changed nothing; it is counted, and logged once a minute for each
caller.

An engine id belongs to the identity that first proved a life of it here. Others with that id are refused until an
operator forgets the id. Callers without a name own nothing. The table lives as long as the process.
"""

import logging
import time
from collections import Counter, OrderedDict
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from kvgrpc.config import Config
from kvgrpc.core.values.owners import ANONYMOUS, SCHEDULER, name_of, of_tenant, tenant_of
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import KVGrpcError, PermissionDenied, Reason, Unauthenticated
from kvgrpc.service import places
from kvgrpc.service.callers import METADATA, PRINCIPAL, TICKET, Metadata, check_ticket
from kvgrpc.service.identity.assignments import Assignments, assignments_of
from kvgrpc.service.identity.authorization_policy import policy_of
from kvgrpc.service.identity.names import DNS, URI, certificate_name
from kvgrpc.service.identity.roles import ANYONE, EVERY, LOCAL, METHODS, Roles
from kvgrpc.service.identity.tokens import TokenVerifier
from kvgrpc.service.identity.watched_file import WatchedFile

OF_IDENTITY_MAX = 256
"""Maximum number of ids of one identity. One more forgets its oldest: an engine without a set id takes a new one at
each start.
"""


IDS_MAX = 65_536
"""Maximum number of engine ids in all. One more forgets the oldest of the identity that has the most."""


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


_log = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
"""Metadata key of a bearer token."""
QUIET_S = 60.0
"""Time after a logged refusal of a caller in which further ones of that caller are not logged, in seconds."""
KEPT_MAX = 4_096
"""Maximum number of callers whose roles, and whose last log lines, are remembered."""


@dataclass(frozen=True)
class KnownCaller:
    """The caller of the call that is served. `principal` owns what the call makes: the name within its tenant."""

    name: str
    roles: Roles
    tenant: str
    principal: str


NOBODY = KnownCaller(ANONYMOUS, EVERY, "", ANONYMOUS)
"""Caller of a server that asks for no identity."""
CALLER: ContextVar[KnownCaller] = ContextVar("caller", default=NOBODY)
"""Caller of the call that is served. A call over a stream of calls has the stream's caller."""


class Gate:
    """The gate of one server."""

    def __init__(self, config: Config) -> None:
        """Raises InvalidRequest for a file that is not usable."""
        identity = config.identity
        self._tls = config.tls.given
        self._tokens = TokenVerifier(config.tokens) if config.tokens.keys else None
        self._file = WatchedFile("identity.roles", Path(identity.roles), assignments_of) if identity.roles else None
        self._policy = WatchedFile("identity.policy", Path(identity.policy), policy_of) if identity.policy else None
        self._open = not (self._tls or self._tokens or self._file or self._policy)
        self._callers: OrderedDict[str, tuple[Assignments | None, KnownCaller]] = OrderedDict()
        """Callers by name, each with the rows that gave its roles. Other rows make it outdated; a thread reads them."""
        self._logged: OrderedDict[str, float] = OrderedDict()
        self.denied: Counter[Reason] = Counter()
        """Number of refused calls by their reasons."""
        if self._file is None and (self._tls or self._tokens):
            _log.warning("identity.roles is not set: every caller with a certificate or a token has all roles")

    def look(self) -> bool:
        """Reads the files again. Returns whether roles, keys or rules are others now."""
        changed = [one.look() for one in (self._tokens, self._file, self._policy) if one is not None]
        return any(changed)

    def admit(self, context: Any, method: str, ticket: bytes) -> None:
        """Lets a call of a method go on, as its caller, or refuses it. `ticket` is the attached engine's, or empty.

        Raises Unauthenticated, PermissionDenied, and Exhausted for a tenant with its share of places.
        """
        shown = token = ""
        metadata = context.invocation_metadata() or ()
        METADATA.set(metadata)
        for key, value in metadata:
            if key == TICKET and isinstance(value, str):
                shown = shown or value
            elif key == AUTHORIZATION and isinstance(value, str):
                token = token or value
        caller = NOBODY
        if not self._open:
            caller = self._caller(context, token, method)
            self.check(method, caller)
            if self._policy is not None:
                self._check_policy(method, caller, metadata)
            CALLER.set(caller)
            if caller.tenant:
                places.belong(caller.tenant)
        if shown:
            check_ticket(shown, ticket)
        PRINCIPAL.set(SCHEDULER if shown else caller.principal)

    def check_within(self, method: str) -> None:
        """Checks a call within the served stream by the roles that the stream's caller has now. Raises as `check`."""
        if not self._open:
            self.check(method, self._known(CALLER.get().name))

    def check(self, method: str, caller: KnownCaller) -> None:
        """Raises Unauthenticated (NOT_AUTHENTICATED) for a caller without a name, and PermissionDenied (ROLE_MISSING)
        for a caller without a role that is enough.
        """
        enough = METHODS[method]
        if enough is ANYONE or not enough.isdisjoint(caller.roles):
            return
        roles = ", ".join(sorted(role.value for role in enough))
        if caller.name == ANONYMOUS:
            what = f"{method} asks who calls: show a certificate or a token of a caller with one of the roles {roles}"
            raise self._refused(Unauthenticated(Reason.NOT_AUTHENTICATED, what, metadata={"roles": roles}), caller.name)
        has = ", ".join(sorted(role.value for role in caller.roles)) or "no role"
        what = f"{method} needs one of the roles {roles}; {caller.name} has {has}"
        raise self._refused(PermissionDenied(Reason.ROLE_MISSING, what, metadata={"roles": roles}), caller.name)

    def _check_policy(self, method: str, caller: KnownCaller, metadata: Metadata) -> None:
        """Raises PermissionDenied (POLICY_DENIED) for a call that the policy does not let go on."""
        assert self._policy is not None
        # The policy's principals are as in a certificate, without the prefixes that tell our kinds of names apart.
        name = "" if caller.name == ANONYMOUS else caller.name.removeprefix(URI).removeprefix(DNS)
        why = self._policy.value.refusal(name, f"/{method}", metadata)
        if why:
            raise self._refused(PermissionDenied(Reason.POLICY_DENIED, f"{method} is refused: {why}"), caller.name)

    def _caller(self, context: Any, token: str, method: str) -> KnownCaller:
        carried: KnownCaller | None = getattr(context, "caller", None)
        name = ANONYMOUS if carried is None else carried.name
        if carried is None and token and self._tokens is not None:
            try:
                name = self._tokens.name_of(token)
            except Unauthenticated as error:
                if METHODS[method] is not ANYONE:
                    raise self._refused(error, "a caller with a token") from None
        elif carried is None and self._tls:
            name = certificate_name(context.auth_context())
        return self._known(name)

    def _known(self, name: str) -> KnownCaller:
        rows = None if self._file is None else self._file.value
        found = self._callers.get(name)
        if found is None or found[0] is not rows:
            found = self._callers[name] = rows, self._assigned(name, rows)
            if len(self._callers) > KEPT_MAX:
                self._callers.popitem(last=False)
        return found[1]

    def _assigned(self, name: str, rows: Assignments | None) -> KnownCaller:
        if rows is None:
            # A caller has shown a certificate of our CAs or a token, or it has no role, if the server asks for one.
            named = name != ANONYMOUS or not (self._tls or self._tokens)
            return KnownCaller(name, EVERY if named else frozenset(), "", name)
        row = rows.of(name)
        return KnownCaller(name, row.roles, row.tenant, of_tenant(row.tenant, name))

    def _refused(self, error: KVGrpcError, who: str) -> KVGrpcError:
        self.denied[error.reason] += 1
        now = time.monotonic()
        if now >= self._logged.get(who, now):
            self._logged[who] = now + QUIET_S
            self._logged.move_to_end(who)
            if len(self._logged) > KEPT_MAX:
                self._logged.popitem(last=False)
            _log.warning("refused: %s", error)
        return error


def check_local(method: str) -> None:
    """Checks a call at the session socket, as the gate checks all others. Raises PermissionDenied (ROLE_MISSING)."""
    if METHODS[method].isdisjoint(LOCAL):
        raise PermissionDenied(Reason.ROLE_MISSING, f"{method} is not for processes of an engine")
