"""EndpointSlices as candidates: the ready pods behind Services. Pure.

Readiness is looked at with every change. An endpoint that serves and ends takes no new work, and one that does not
serve is left out. A Service that publishes endpoints before they are ready says `ready` of all of them, and `serving`
only of those that are: so `serving` counts, and `ready` where it is missing.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvgrpc.fleet.entry import EngineRole
from kvgrpc.registry.introductions import Candidate

ANNOTATIONS = "kvgrpc.dev/"
"""Beginning of the annotations role and tenant. Kubernetes copies those of a Service to its slices."""
SERVICE = "kubernetes.io/service-name"
"""Label of the Service that a slice belongs to."""


def candidates(slices: Iterable[Mapping[str, Any]], port: str, domain: str = "") -> list[Candidate]:
    """Returns one candidate for each pod, in order. A pod may be in several slices for a moment, and is in two if it
    has addresses of both families: one that takes new work comes before one that ends, and IPv4 before the others.

    `port` is the name of the leads' port. With `domain`, such as svc or svc.cluster.local, a pod that has a host name
    in its Service is called by that name, which certificates have.
    """
    found: dict[str, tuple[tuple[bool, bool, str], Candidate]] = {}
    for one in slices:
        for candidate in _of(one, port, domain):
            place = candidate.draining, one.get("addressType") != "IPv4", candidate.address
            if candidate.key not in found or place < found[candidate.key][0]:
                found[candidate.key] = place, candidate
    return [candidate for _, (_, candidate) in sorted(found.items())]


def _of(one: Mapping[str, Any], port: str, domain: str) -> Iterable[Candidate]:
    head = _table(one.get("metadata"))
    said, labels = _table(head.get("annotations")), _table(head.get("labels"))
    namespace = _text(head.get("namespace"))
    number = next((row.get("port") for row in _rows(one.get("ports")) if row.get("name") == port), None)
    if not isinstance(number, int):
        return
    for row in _rows(one.get("endpoints")):
        addresses = row.get("addresses")
        if not isinstance(addresses, list) or not addresses:
            continue
        serves, ends = _conditions(_table(row.get("conditions")))
        if not serves:
            continue
        host, service = _text(row.get("hostname")), _text(labels.get(SERVICE))
        # All addresses of an endpoint are one pod's, and clients take the first.
        address = f"[{addresses[0]}]" if one.get("addressType") == "IPv6" else str(addresses[0])
        if domain and host and service:
            address = f"{host}.{service}.{namespace}.{domain}"
        pod = _text(_table(row.get("targetRef")).get("name"))
        yield Candidate(
            f"{namespace}/{pod or address}:{number}",
            f"{address}:{number}",
            _role(said),
            _text(said.get(f"{ANNOTATIONS}tenant")),
            _text(row.get("nodeName")),
            ends,
        )


def _conditions(said: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns whether the endpoint serves, and whether it ends. What is not known counts as good."""
    ready = said.get("ready") is not False
    serving = said.get("serving")
    return ready if serving is None else serving is True, said.get("terminating") is True


def _role(said: Mapping[str, Any]) -> EngineRole | None:
    """Returns the role of the annotations; None: they have none, or none that is known."""
    stated = said.get(f"{ANNOTATIONS}role")
    return next((role for role in EngineRole if role == stated), None)


def _table(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _rows(found: Any) -> list[Mapping[str, Any]]:
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _text(found: Any) -> str:
    return found if isinstance(found, str) else ""
