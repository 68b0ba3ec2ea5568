"""Owners: who may do what with a thing that a request names.

A thing has one owner: the attached engine, or the principal that made the thing. Some verbs are also open to callers
that are not the owner and show a ground instead: the transfer key, a grant, or the thing's id where ids are 128 random
bits. `may` is the only place that decides. A caller that may not is told what a caller hears of a thing that does not
exist.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

ENGINE = "engine"
"""Principal of the attached engine's session."""
SCHEDULER = "scheduler"
"""Principal of a caller by RPC that shows the ticket of the attached engine."""
ANONYMOUS = "anonymous"
"""Principal of callers without credentials."""
STORE = "store"
"""Principal of the lead's own staging store: it may all, and owns what tensors lie in. No caller has it."""
PEER = "peer "
"""With its life: the principal of a peer."""
EVERYONE = ""
"""Owner of what belongs to every caller alike: a pool whose blocks the server gives out."""
ENGINE_SIDE = frozenset({ENGINE, SCHEDULER})
"""Principals that stand for the attached engine; what one of them owns the other owns, too."""


class Kind(Enum):
    """What a thing is."""

    # As in `timers.Timer`.
    __hash__ = object.__hash__

    POOL = "pool"
    BLOCKS = "blocks"
    ALLOCATION = "allocation"
    LEASE = "lease"
    TRANSFER = "transfer"
    HELD_TENSOR = "held tensor"
    REQUEST = "request"


class Verb(Enum):
    """What a caller wants to do."""

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
    """Why a caller may."""

    __hash__ = object.__hash__

    OWNER = "its owner"
    NAME = "who knows its id"
    KEY = "who knows its transfer key"
    GRANT = "who holds its grant"
    ENGINE = "the engine"


RIGHTS: Mapping[tuple[Kind, Verb], frozenset[Ground]] = {
    (Kind.POOL, Verb.SCHEDULE): frozenset({Ground.OWNER}),
    (Kind.BLOCKS, Verb.USE): frozenset({Ground.OWNER}),
    (Kind.ALLOCATION, Verb.USE): frozenset({Ground.OWNER}),
    (Kind.ALLOCATION, Verb.RENEW): frozenset({Ground.OWNER}),
    (Kind.LEASE, Verb.MINT): frozenset({Ground.OWNER}),
    (Kind.LEASE, Verb.SEE): frozenset({Ground.OWNER, Ground.NAME, Ground.GRANT}),
    (Kind.LEASE, Verb.RENEW): frozenset({Ground.OWNER, Ground.NAME, Ground.GRANT, Ground.KEY}),
    (Kind.LEASE, Verb.END): frozenset({Ground.OWNER, Ground.NAME, Ground.GRANT}),
    (Kind.LEASE, Verb.TAKE_BACK): frozenset({Ground.OWNER, Ground.ENGINE}),
    (Kind.TRANSFER, Verb.SEE): frozenset({Ground.OWNER, Ground.NAME}),
    (Kind.TRANSFER, Verb.END): frozenset({Ground.OWNER, Ground.NAME, Ground.KEY}),
    (Kind.TRANSFER, Verb.GIVE_BLOCKS): frozenset({Ground.OWNER}),
    (Kind.TRANSFER, Verb.ADD_PART): frozenset({Ground.OWNER}),
    (Kind.TRANSFER, Verb.ACKNOWLEDGE): frozenset({Ground.OWNER}),
    (Kind.REQUEST, Verb.SCHEDULE): frozenset({Ground.OWNER}),
    (Kind.HELD_TENSOR, Verb.END): frozenset({Ground.OWNER, Ground.ENGINE}),
}
"""The grounds of which one is enough."""


class Thing(NamedTuple):
    """What a request names, and whose it is."""

    kind: Kind
    owner: str


def may(caller: str, verb: Verb, thing: Thing, shown: Ground | None = None) -> bool:
    """Whether a principal may do that with a thing, which it named by the ground `shown`, if by one."""
    enough = RIGHTS[thing.kind, verb]
    if caller == STORE or shown in enough or (Ground.ENGINE in enough and caller in ENGINE_SIDE):
        return True
    return Ground.OWNER in enough and owns(caller, thing.owner)


def owns(caller: str, owner: str) -> bool:
    """Whether a principal is that owner, or stands for the same engine."""
    return owner in (EVERYONE, caller) or (caller in ENGINE_SIDE and owner in ENGINE_SIDE)
