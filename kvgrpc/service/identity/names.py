"""Names of callers, as roles and owners are given to them. Each kind of proof has a prefix of its own, so that no proof
gives a name that another kind gives.
"""

import functools
from collections.abc import Iterable, Mapping

from kvgrpc.core.values.owners import ANONYMOUS

SPIFFE = "spiffe://"
"""Prefix of a SPIFFE id, which is its own name."""
URI = "uri:"
"""Prefix of the name by another URI of a certificate."""
DNS = "dns:"
"""Prefix of the name by a DNS name of a certificate."""
JWT = "jwt:"
"""Prefix of the name by the subject of a token."""
KINDS = (SPIFFE, URI, DNS, JWT)
NAME_BYTES_MAX = 512
"""Maximum size of a name, in bytes; a longer one is nobody's."""
STATED_KEPT = 1_024
"""Maximum number of names of certificates that are remembered."""

Properties = Mapping[str, Iterable[bytes]]
"""Properties of a connection, as gRPC's auth context has them."""


def certificate_name(properties: Properties) -> str:
    """Returns the caller's name by its certificate: the SPIFFE id, else the first other URI, else the first DNS name of
    the subject alternative names. Without any of them the caller is anonymous; a common name is no name.
    """
    for key, prefix in (("peer_spiffe_id", ""), ("peer_uri", URI), ("peer_dns", DNS)):
        for raw in properties.get(key, ()):
            name = _stated(prefix, raw)
            # gRPC puts what it takes for a SPIFFE id under its own key; only that prefix may stand alone.
            if name and (prefix or name.startswith(SPIFFE)):
                return name
    return ANONYMOUS


@functools.lru_cache(STATED_KEPT)
def _stated(prefix: str, raw: bytes) -> str:
    """Returns the name of what a certificate states. Every call of a caller asks anew, with the same certificate."""
    return readable(prefix, raw.decode(errors="replace"))


def readable(prefix: str, text: str) -> str:
    """Returns the name of a text; empty for a text that can be no name, because of its length or its characters."""
    whole = text and f"{prefix}{text}".isprintable() and " " not in text and "\N{REPLACEMENT CHARACTER}" not in text
    name = f"{prefix}{text}" if whole else ""
    return name if len(name.encode()) <= NAME_BYTES_MAX else ""
