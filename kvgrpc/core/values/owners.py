"""Owners: decides who may do what with a thing that a request names.

A thing has one owner: the attached engine, or the principal that made the thing. Some verbs are also open to other
callers that show a ground: the transfer key, a grant, or the thing's id where ids are 128 random bits. `may` is the
only place that decides. A caller without the right gets the same answer as for a thing that does not exist.
"""

from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

ENGINE = "engine"
"""Principal of the attached engine's session."""
SCHEDULER = "scheduler"
"""Principal of a caller by RPC that shows the ticket of the attached engine."""
ANONYMOUS = "anonymous"
"""Principal of callers without credentials."""
STORE = "store"
"""Principal of the lead's own staging store, with every right. It owns the memory of tensors. No caller has it."""
PEER = "peer "
"""Prefix of a peer's principal; the peer's life follows."""
TENANT = "tenant "
"""Prefix of the principal of a caller with a tenant; the tenant and the caller's name follow."""
EVERYONE = ""
"""Owner of what belongs to every caller alike: a pool whose blocks the server gives out."""
TENANTS_KEPT = 4_096
"""Maximum number of principals whose tenant is cached: every check of a call asks."""
ENGINE_SIDE = frozenset({ENGINE, SCHEDULER})
"""Principals that stand for the attached engine. Each owns what the other owns."""


class ThingKind(Enum):
    """The kind of a thing."""

    # Identity is enough, and Enum's own hash is slow, as in `timers.Timer`.
    __hash__ = object.__hash__

    POOL = "pool"
    BLOCKS = "blocks"
    ALLOCATION = "allocation"
    LEASE = "lease"
    TRANSFER = "transfer"
    HELD_TENSOR = "held tensor"
    REQUEST = "request"


class Verb(Enum):
    """The action that a caller wants to take."""

    __hash__ = object.__hash__

    SEE = "see"
    SCHEDULE = "schedule"
    USE = "hand over, fill, put or free"
    RENEW = "renew"
    TAKE_BACK = "take back"
    MINT = "mint the id of"
    END = "end"
    GIVE_BLOCKS = "give blocks to"
    ADD_PART = "add a part to"
    ACKNOWLEDGE = "acknowledge"


class Ground(Enum):
    """A reason for which a caller has a right."""

    __hash__ = object.__hash__

    OWNER = "its owner"
    NAME = "who knows its id"
    KEY = "who knows its transfer key"
    GRANT = "who holds its grant"
    ENGINE = "the engine"


RIGHTS: Mapping[tuple[ThingKind, Verb], frozenset[Ground]] = {
    (ThingKind.POOL, Verb.SCHEDULE): frozenset({Ground.OWNER}),
    (ThingKind.BLOCKS, Verb.USE): frozenset({Ground.OWNER}),
    (ThingKind.ALLOCATION, Verb.USE): frozenset({Ground.OWNER}),
    (ThingKind.ALLOCATION, Verb.RENEW): frozenset({Ground.OWNER}),
    (ThingKind.LEASE, Verb.MINT): frozenset({Ground.OWNER}),
    (ThingKind.LEASE, Verb.SEE): frozenset({Ground.OWNER, Ground.NAME, Ground.GRANT}),
    (ThingKind.LEASE, Verb.RENEW): frozenset({Ground.OWNER, Ground.NAME, Ground.GRANT, Ground.KEY}),
    (ThingKind.LEASE, Verb.END): frozenset({Ground.OWNER, Ground.NAME, Ground.GRANT}),
    (ThingKind.LEASE, Verb.TAKE_BACK): frozenset({Ground.OWNER, Ground.ENGINE}),
    (ThingKind.TRANSFER, Verb.SEE): frozenset({Ground.OWNER, Ground.NAME}),
    (ThingKind.TRANSFER, Verb.END): frozenset({Ground.OWNER, Ground.NAME, Ground.KEY}),
    (ThingKind.TRANSFER, Verb.GIVE_BLOCKS): frozenset({Ground.OWNER}),
    (ThingKind.TRANSFER, Verb.ADD_PART): frozenset({Ground.OWNER}),
    (ThingKind.TRANSFER, Verb.ACKNOWLEDGE): frozenset({Ground.OWNER}),
    (ThingKind.REQUEST, Verb.SCHEDULE): frozenset({Ground.OWNER}),
    (ThingKind.HELD_TENSOR, Verb.END): frozenset({Ground.OWNER, Ground.ENGINE}),
}
"""Grounds for each kind and verb. One of them is enough."""


class Thing(NamedTuple):
    """A thing that a request names, with its owner."""

    kind: ThingKind
    owner: str
    tenant: str = ""
    """Its tenant, if its owner, an engine, made it for one; else the owner's counts."""


@lru_cache(TENANTS_KEPT)
def tenant_of(principal: str) -> str:
    """Returns the tenant of a principal; empty for one of none, which belongs to the house."""
    return principal.removeprefix(TENANT).partition(" ")[0] if principal.startswith(TENANT) else ""


def name_of(principal: str) -> str:
    """Returns the caller's name, without its tenant."""
    return principal.removeprefix(TENANT).partition(" ")[2] if principal.startswith(TENANT) else principal


def within(caller: str, tenant: str) -> bool:
    """Returns True if a principal may know of a thing of that tenant. A caller of the house may know of everything, and
    everyone who can name it of a thing of the house.
    """
    return meet(tenant_of(caller), tenant)


def meet(one: str, other: str) -> bool:
    """Returns True if tenants may know of each other's things: they are one, or one is none, which is the house."""
    return not one or not other or one == other


def of_tenant(tenant: str, name: str) -> str:
    """Returns the principal of a caller with that name. `tenant` has no space; it is empty for a caller of none."""
    return f"{TENANT}{tenant} {name}" if tenant else name


def may(caller: str, verb: Verb, thing: Thing, shown: Ground | None = None) -> bool:
    """Returns True if a principal may do `verb` to a thing. `shown` is the ground by which it named the thing."""
    if caller.startswith(TENANT) and not within(caller, thing.tenant or tenant_of(thing.owner)):
        return False
    enough = RIGHTS[thing.kind, verb]
    if caller == STORE or shown in enough or (Ground.ENGINE in enough and caller in ENGINE_SIDE):
        return True
    return Ground.OWNER in enough and owns(caller, thing.owner)


def owns(caller: str, owner: str) -> bool:
    """Returns True if a principal is that owner, or stands for the same engine."""
    return owner in (EVERYONE, caller) or (caller in ENGINE_SIDE and owner in ENGINE_SIDE)
