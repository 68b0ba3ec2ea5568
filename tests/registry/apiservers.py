"""A real kube-apiserver on loopback, with an etcd of its own. No controller runs: a test writes the slices itself."""

import json
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kvgrpc.registry.kubernetes.settings import KubernetesSettings
from tests.operators.programs import APISERVER
from tests.registry.etcds import MISSING, RunningEtcd, free_port

_WHY = "" if APISERVER.exists() else f"{APISERVER} is not there: `make apiserver` builds it, APISERVER=path names yours"
needs_apiserver = pytest.mark.skipif(bool(MISSING or _WHY), reason=MISSING or _WHY)
NAMESPACE = "llm"
OPERATOR, READER, PUBLISHER, STRANGER = "operator", "reader", "publisher", "stranger"
START_S = 120.0
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
ROLES = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"


class RunningApiServer:
    """An API server that may be killed, stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.store = RunningEtcd(folder / "etcd")
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        key = ec.generate_private_key(ec.SECP256R1())
        form = (Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        (folder / "key.pem").write_bytes(key.private_bytes(*form))
        users = (f"{one},{one},{one}" for one in (READER, PUBLISHER, STRANGER))
        rows = [f"{OPERATOR},{OPERATOR},1,system:masters", *users]
        (folder / "tokens.csv").write_text("".join(f"{row}\n" for row in rows))

    def start(self) -> None:
        key, certs = self._folder / "key.pem", self._folder / "certs"
        command = [
            str(APISERVER), f"--etcd-servers=http://{self.store.address}", f"--cert-dir={certs}",
            "--bind-address=127.0.0.1", f"--secure-port={self._port}", "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}", f"--token-auth-file={self._folder / 'tokens.csv'}",
            "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
        ]  # fmt: skip
        with (self._folder / "apiserver.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            assert time.monotonic() < deadline, (self._folder / "apiserver.log").read_text()[-2_000:]
            with suppress(OSError):
                self.call("GET", "/readyz", read=False)
                return

    def prepare(self) -> None:
        """Makes the namespace, and lets the reader do what docs/fleet.md lists."""
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        verbs = ["list", "watch"]
        leases = [*verbs, "create", "patch", "delete"]
        self.allow(READER, {"discovery.k8s.io/endpointslices": verbs, "coordination.k8s.io/leases": leases})

    def allow(self, user: str, rights: dict[str, list[str]]) -> None:
        """Gives a user verbs on resources, each GROUP/RESOURCE."""
        rules = [
            {"apiGroups": [group], "resources": [resource], "verbs": verbs}
            for (group, resource), verbs in ((name.split("/"), verbs) for name, verbs in rights.items())
        ]
        self.call("POST", f"{ROLES}/roles", {"metadata": {"name": user}, "rules": rules})
        group = "rbac.authorization.k8s.io"
        bound = {
            "metadata": {"name": user},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": user},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
        }
        self.call("POST", f"{ROLES}/rolebindings", bound)

    def settings(self, token: str = READER, **changes: Any) -> KubernetesSettings:
        file = self._folder / f"token-{token}"
        file.write_text(f"{token}\n")
        ca = self._folder / "certs" / "apiserver.crt"
        given = {"timeout_s": 1.0, "watch_s": 3.0, **changes}
        return KubernetesSettings(f"https://127.0.0.1:{self._port}", NAMESPACE, file, ca, **given)

    def account(self, token: str = READER) -> Path:
        """Returns the folder of a service account, as a pod finds it."""
        folder = self._folder / f"account-{token}"
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(token)
        (folder / "namespace").write_text(NAMESPACE)
        (folder / "ca.crt").write_bytes((self._folder / "certs" / "apiserver.crt").read_bytes())
        return folder

    def environment(self, pod: str = "") -> dict[str, str]:
        """Returns the variables of a pod."""
        own = {"POD_NAME": pod, "POD_UID": f"uid-{pod}"} if pod else {}
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self._port), **own}

    def call(self, method: str, path: str, body: object = None, *, read: bool = True) -> Any:
        form = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {OPERATOR}", "Content-Type": form}
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"https://127.0.0.1:{self._port}{path}", data, headers, method=method)
        certificate = self._folder / "certs" / "apiserver.crt"
        trusted = ssl.create_default_context(cafile=str(certificate) if certificate.exists() else None)
        with urllib.request.urlopen(asked, timeout=20, context=trusted) as reply:
            return json.load(reply) if read else None

    def empty(self) -> None:
        """Deletes what a test has made."""
        for path in (SLICES, LEASES):
            self.call("DELETE", path)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(10)


@pytest.fixture(scope="module")
def running_apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApiServer]:
    made = RunningApiServer(tmp_path_factory.mktemp("apiserver"))
    made.store.start()
    try:
        made.start()
        made.prepare()
        yield made
    finally:
        made.end()
        made.store.end()


@pytest.fixture
def apiserver(running_apiserver: RunningApiServer) -> RunningApiServer:
    running_apiserver.empty()
    return running_apiserver


def slice_of(name: str, *endpoints: dict[str, Any], **head: Any) -> dict[str, Any]:
    """Returns an EndpointSlice of the Service kv."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name, "namespace": NAMESPACE, "annotations": head.pop("annotations", {}),
            "labels": {"kubernetes.io/service-name": "kv", "app": "kvgrpc"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}, {"name": "grpc", "port": 50051}],
        "endpoints": list(endpoints),
        **head,
    }  # fmt: skip


def endpoint(pod: str, address: str, **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": {"ready": True, "serving": True, "terminating": False, **conditions},
        "targetRef": {"kind": "Pod", "name": pod, "namespace": NAMESPACE},
        "nodeName": "node-1",
        "hostname": pod,
    }
