"""The chart deploy/helm/kvgrpc, rendered by Helm with several sets of values. Every manifest is compared with the
schemas of Kubernetes and given to a kube-apiserver, and kvgrpc reads the settings of every lead.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgrpc.config import Config
from kvgrpc.config_sources import load
from kvgrpc.errors import InvalidRequest
from tests.operators import apiserver
from tests.operators.programs import Missing, Programs

SCHEMAS = Path(__file__).with_name("schemas.py")
"""Runs with another Python, which has what it imports."""
CHART = Path(__file__).parents[2] / "deploy/helm/kvgrpc"
INSECURE = ("tls.enabled=false", "insecure=true", "lead.dialAllow={10.244.0.0/16}")
PICKER = ("fleet.enabled=true", "fleet.model=llama", "fleet.picker.enabled=true", "fleet.picker.inferencePool=true")
ROLES = r"""[[callers]]
name = "spiffe://cluster.local/ns/llm/sa/kv-kvgrpc-fleet"
roles = ["router"]
[[callers]]
name = "spiffe://cluster.local/*"
roles = ["peer"\, "operator"]
"""
"""A file of roles. `helm --set` wants commas escaped."""
CASES: dict[str, tuple[str, ...]] = {
    "default": (),
    "tls": (
        "tls.certManager.enabled=true", "tls.kvInPlainText=true", f"tls.roles={ROLES}",
        "podMonitor.enabled=true", "podMonitor.labels.release=prometheus", "prefill.replicas=2", "fleet.reader=true",
    ),
    "insecure": (
        *INSECURE, "podMonitor.enabled=true", "lead.settings.KVGRPC_LIMITS_LEASE_TTL_S=60",
        "engine.connector.mode=pull", "engine.env.HF_HOME=/models", "router.args={--help}",
        "networkPolicy.grpcFrom[0].podSelector.matchLabels.app=cancels",
    ),
    "rdma": (
        "rdma.enabled=true", "rdma.devices=mlx5_0:1", "rdma.transports=rc", "engine.podAnnotations.a=b",
        "prefill.nodeSelector.pool=rdma", "prefill.tolerations[0].operator=Exists",
    ),
    "sidecar": ("lead.sidecar=true", "engine.command={serve-my-engine}", "tls.prefillSecret=p", "tls.decodeSecret=d"),
    "leases": ("lead.sidecar=true", "fleet.registry=kubernetes-leases://"),
    "slices": ("fleet.reader=true", "fleet.registry=kubernetes://?selector=app.kubernetes.io/name=kvgrpc"),
    "fleet": (
        "fleet.enabled=true", "tls.certManager.enabled=true", f"tls.roles={ROLES}", "podMonitor.enabled=true",
        "networkPolicy.fleetFrom[0].podSelector.matchLabels.app=routes", "fleet.settings.KVGRPC_LOG_LEVEL=debug",
    ),
    "picker": (
        *INSECURE, *PICKER, "fleet.picker.port=8001", "decode.containers[0].name=sidecar",
        "decode.containers[0].image=registry.example/sidecar", "router.enabled=false",
        "networkPolicy.gatewayFrom[0].namespaceSelector.matchLabels.gateway=yes",
    ),
    "fleet_of_leases": ("fleet.enabled=true", "fleet.registry=kubernetes-leases://", "fleet.replicas=1"),
    "fleet_of_etcd": (
        "fleet.enabled=true", "fleet.registry=etcd://etcd.llm.svc:2379", "tls.fleetSecret=f",
        "fleet.nodeSelector.pool=cpu", "fleet.tolerations[0].operator=Exists", "engine.imagePullSecrets[0].name=pull",
    ),
    "shared": ("lead.sharedDir=/run/kvgrpc-pods", "lead.sidecar=true"),
    "host": (*INSECURE, "engine.hostNetwork=true", "engine.hostPID=true", "networkPolicy.enabled=false"),
    "alone": ("router.enabled=false", "networkPolicy.ephemeral.enabled=false", "engine.health="),
}  # fmt: skip
"""Values of each case, as `helm --set` takes them."""
REFUSED = {
    "neither TLS nor insecure": (
        "needs tls.enabled, or insecure", ("tls.enabled=false", "lead.dialAllow={10.0.0.0/8}")
    ),
    "TLS and insecure": ("exclude each other", ("insecure=true",)),
    "nothing that may be dialled": ("lead.dialAllow needs", ("tls.enabled=false", "insecure=true")),
    "a picker without servers of the fleet": ("needs fleet.enabled", ("fleet.picker.enabled=true", "fleet.model=m")),
    "a picker of no model": ("needs fleet.model", ("fleet.enabled=true", "fleet.picker.enabled=true")),
    "a pool without a picker": (
        "needs fleet.picker.enabled", ("fleet.enabled=true", "fleet.picker.inferencePool=true")
    ),
    "a file of engines that no server has": (
        "no file of engines", ("fleet.enabled=true", "fleet.registry=file:/engines.toml")
    ),
}  # fmt: skip
"""Values that the chart refuses, each with a part of what it says."""
BROKEN = """apiVersion: apps/v1
kind: Deployment
metadata: {name: broken}
spec: {replicas: two, selector: {}, template: {}}
"""
"""A manifest that no API server takes."""


@dataclass(frozen=True)
class Manifest:
    """One manifest of one case, as `schemas.py` prints it."""

    case: str
    kind: str
    name: str
    error: str
    known: bool
    body: dict[str, Any]


@dataclass
class ManifestsFound:
    """All manifests, and what is wrong."""

    rows: list[Manifest] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    valid: int = 0
    """Number of manifests that the judge takes."""
    judge: str = "schemas"
    """What says that a manifest is valid."""


def check(programs: Programs, folder: Path) -> ManifestsFound:
    """Renders the chart, and looks at what comes. Raises Missing."""
    found = ManifestsFound()
    for case, values in CASES.items():
        for verb in (["lint", "--strict", str(CHART)], ["template", "kv", str(CHART)]):
            ended = _helm(programs, *verb, values=values)
            if ended.returncode:
                found.wrong.append(f"helm {verb[0]} of {case}: {ended.stdout[-500:]}{ended.stderr[-500:]}")
            elif verb[0] == "template":
                found.rows += compared(programs, case, ended.stdout)
    for case, (why, values) in REFUSED.items():
        if why not in refusal(programs, *values):
            found.wrong.append(f"the chart takes {case}")
    (broken,) = compared(programs, "broken", BROKEN)
    if not broken.error:
        found.wrong.append("the schemas take a manifest that is broken")
    (folder / "manifests.json").write_text(json.dumps([row.body for row in found.rows]))
    found.wrong += [f"{row.case}: {row.kind} {row.name}: {row.error}" for row in found.rows if row.error]
    for row in found.rows:
        found.wrong += [f"{row.case}: {row.kind} {row.name}: {why}" for why in unusable(row.body)]
    found.valid = sum(row.known and not row.error for row in found.rows)
    try:
        with apiserver.serving(programs, folder) as server:
            _ask(server, found, broken)
    except Missing as missing:
        sys.stderr.write(f"no kube-apiserver, the schemas judge alone: {missing}\n")
    return found


def _ask(server: apiserver.ApiServer, found: ManifestsFound, broken: Manifest) -> None:
    """Gives all manifests to the API server, which then is their judge."""
    refusals = [(row, refusal) for row in found.rows if (refusal := server.refusal(row.body))]
    found.judge, found.valid = f"kube-apiserver {server.version}", len(found.rows) - len(refusals)
    found.wrong += [f"{row.case}: {row.kind} {row.name}: the API server says {why}" for row, why in refusals]
    if not server.refusal(broken.body):
        found.wrong.append("the API server takes a manifest that is broken")


def rendered(programs: Programs, *values: str) -> list[Manifest]:
    """Returns the manifests of the chart with these values. Raises Missing."""
    ended = _helm(programs, "template", "kv", str(CHART), values=values)
    assert not ended.returncode, ended.stderr
    return compared(programs, "", ended.stdout)


def refusal(programs: Programs, *values: str) -> str:
    """Returns why the chart refuses these values; empty: it takes them. Raises Missing."""
    ended = _helm(programs, "template", "kv", str(CHART), values=values)
    return ended.stderr if ended.returncode else ""


def compared(programs: Programs, case: str, text: str) -> list[Manifest]:
    """Returns the manifests of a text, compared with the schemas. Raises Missing."""
    command = [str(programs.need("kubernetes")), str(SCHEMAS), str(programs.need("crds"))]
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=120)
    return [Manifest(case=case, **row) for row in json.loads(ended.stdout)]


def unusable(body: dict[str, Any]) -> Iterator[str]:
    """Yields why kvgrpc does not start with the settings of a manifest's containers."""
    pod = body["spec"]["template"]["spec"] if body["kind"] in ("StatefulSet", "Deployment") else {}
    for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
        if any(one["name"] == "KVGRPC_METRICS" for one in container.get("env", ())):
            try:
                settings(container)
            except InvalidRequest as error:
                yield f"container {container['name']}: {error}"


def settings(container: dict[str, Any]) -> Config:
    """Returns the configuration of the server in a container, as the kubelet would start it. Raises InvalidRequest."""
    known = {"POD_NAME": "kv-kvgrpc-prefill-0", "POD_IP": "10.244.0.7"}
    for one in container["env"]:
        if "value" in one:
            known[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], one["value"])
    variables = {name: value for name, value in known.items() if name.startswith("KVGRPC_")}
    return load(None, {"KVGRPC_LISTEN": "0.0.0.0:50051"} | variables, {})


def _helm(programs: Programs, *arguments: str, values: Sequence[str]) -> subprocess.CompletedProcess[str]:
    flags = [word for value in values for word in ("--set", value)]
    command = [str(programs.need("helm")), *arguments, "--namespace", "llm", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
