"""Settings of the API of Kubernetes, and what a pod finds of them in its service account."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvgrpc.errors import invalid

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which a pod finds its token, the CA of the API server, and its namespace."""
WATCH_S = 20.0
"""Time after which the API server ends a watch, in seconds."""
PAGE_OBJECTS = 100
"""Maximum number of objects in one reply."""
OBJECTS_MAX = 4_096
"""Maximum number of objects that are kept, as a directory takes no more entries; the rest is not read."""
BODY_BYTES_MAX = 64 << 20
"""Maximum size of a page, and of one event, in bytes."""


@dataclass(frozen=True)
class KubernetesSettings:
    """Address of the API server, and who calls it. The token is read again for each call, because it is renewed."""

    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None
    """CA of the API server; None: those of this machine."""
    timeout_s: float = 3.0
    """Deadline of each call, in seconds."""
    watch_s: float = WATCH_S
    page_objects: int = PAGE_OBJECTS
    objects_max: int = OBJECTS_MAX
    body_bytes_max: int = BODY_BYTES_MAX


def in_cluster(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> KubernetesSettings:
    """Returns the settings of a pod, as its service account has them. Raises InvalidRequest."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise invalid("registry", "kubernetes:// without an address works in a pod only")
    try:
        namespace = (folder / "namespace").read_text().strip()
    except OSError as error:
        raise invalid("registry", f"the pod has no service account (automountServiceAccountToken): {error}") from error
    if ":" in host:
        host = f"[{host}]"
    return KubernetesSettings(f"https://{host}:{port}", namespace, folder / "token", folder / "ca.crt")
