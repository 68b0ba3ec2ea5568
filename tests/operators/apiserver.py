"""A real kube-apiserver with an etcd of its own. It validates manifests and keeps none of them."""

import json
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.operators.programs import Missing, Programs, free_ports, running
from tests.service.engines import wait_until

NAMESPACE = "llm"
START_S = 120.0
TOKEN = "operator"
YAML, JSON = "application/yaml", "application/json"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class ApiServer:
    """A kube-apiserver that runs."""

    def __init__(self, address: str, certificate: Path) -> None:
        self._url, self._certificate = f"https://{address}", certificate
        self._kinds: dict[str, dict[str, tuple[str, bool]]] = {}

    @property
    def version(self) -> str:
        """Its version, such as 1.36.3."""
        return str(self._call("GET", "/version")["gitVersion"]).removeprefix("v")

    def prepare(self, crds: Path) -> None:
        """Makes the namespace, and the custom resources of a folder. Waits until all of their kinds are served."""
        name = {"name": NAMESPACE}
        self._call("POST", "/api/v1/namespaces", _encoded({"apiVersion": "v1", "kind": "Namespace", "metadata": name}))
        for path in sorted(crds.glob("*.yaml")):
            spec = self._call("POST", CRDS, _without_templates(path.read_bytes()), YAML)["spec"]
            for version in (one["name"] for one in spec["versions"] if one["served"]):
                wait_until(partial(self._has, f"{spec['group']}/{version}", spec["names"]["kind"]), START_S)

    def refusal(self, body: dict[str, Any]) -> str:
        """Returns why it does not take a manifest; empty: it takes it."""
        group, kind = body["apiVersion"], body["kind"]
        try:
            if group not in self._kinds:
                self._kinds[group] = self._found(group)
            if kind not in self._kinds[group]:
                return f"{group} has no {kind}"
            name, namespaced = self._kinds[group][kind]
            folder = f"namespaces/{NAMESPACE}/" if namespaced else ""
            self._call("POST", f"{_base(group)}/{folder}{name}?dryRun=All&fieldValidation=Strict", _encoded(body))
        except urllib.error.HTTPError as error:
            said = error.read()
            return str(json.loads(said)["message"]) if said.startswith(b"{") else f"{error.code} {said.decode()}"
        return ""

    def _found(self, group: str) -> dict[str, tuple[str, bool]]:
        """Returns the resources of a group, by kind: the name, and whether it lies in a namespace."""
        try:
            rows = self._call("GET", _base(group))["resources"]
        except urllib.error.HTTPError:
            return {}
        return {row["kind"]: (row["name"], row["namespaced"]) for row in rows if "/" not in row["name"]}

    def _has(self, group: str, kind: str) -> bool:
        return kind in self._found(group)

    def ready(self) -> bool:
        """Returns whether it serves."""
        try:
            self._call("GET", "/readyz", read=False)
        except OSError:
            return False
        return True

    def _call(self, method: str, path: str, body: bytes | None = None, form: str = JSON, *, read: bool = True) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": form}
        asked = urllib.request.Request(self._url + path, body, headers, method=method)
        trusted = ssl.create_default_context(cafile=str(self._certificate))
        with urllib.request.urlopen(asked, timeout=20, context=trusted) as reply:
            return json.load(reply) if read else None


def _base(group: str) -> str:
    return f"/api/{group}" if "/" not in group else f"/apis/{group}"


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _without_templates(text: bytes) -> bytes:
    """Returns a file without the lines that Helm would fill in."""
    return b"\n".join(line for line in text.splitlines() if b"{{" not in line)


@contextmanager
def serving(programs: Programs, folder: Path) -> Iterator[ApiServer]:
    """Runs a kube-apiserver that knows the custom resources. Raises Missing."""
    etcd, crds = shutil.which("etcd"), programs.need("crds")
    if not programs.apiserver.exists():
        raise Missing(f"it is not at {programs.apiserver}: `make apiserver` builds it, APISERVER=path names yours")
    if etcd is None:
        raise Missing("etcd is not on the PATH: Debian's package etcd-server has it")
    port, clients, peers = free_ports(3)
    store, peer, certs = f"http://127.0.0.1:{clients}", f"http://127.0.0.1:{peers}", folder / "certs"
    key = ec.generate_private_key(ec.SECP256R1())
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    (folder / "tokens.csv").write_text(f"{TOKEN},{TOKEN},1,system:masters\n")
    etcd_command = [
        etcd, "--name=t", f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync", f"--initial-cluster=t={peer}",
        f"--listen-client-urls={store}", f"--advertise-client-urls={store}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
    ]  # fmt: skip
    api_command = [
        str(programs.apiserver), f"--etcd-servers={store}", f"--cert-dir={certs}", "--bind-address=127.0.0.1",
        f"--secure-port={port}", "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={folder / 'key.pem'}",
        f"--service-account-signing-key-file={folder / 'key.pem'}", f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
    ]  # fmt: skip
    made, log = ApiServer(f"127.0.0.1:{port}", certs / "apiserver.crt"), folder / "apiserver.log"
    with running(etcd_command, folder / "etcd.log"), running(api_command, log):
        wait_until(made.ready, START_S, what=log.read_text)
        made.prepare(crds)
        yield made
