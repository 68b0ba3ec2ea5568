"""The chart's servers of the fleet at a real kube-apiserver: what their service account may do, which leads they find,
and that `kvgrpc fleet` with the variables of the Deployment passes its probes.
"""

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.fleet.entry import EngineEntry, EngineRole
from kvgrpc.registry.addresses import registry_at
from tests.fleet.entries import entry
from tests.operators.manifests import INSECURE, PICKER, rendered, settings
from tests.operators.programs import Missing, found_in
from tests.registry.apiservers import (
    NAMESPACE,
    ROLES,
    SLICES,
    RunningApiServer,
    endpoint,
    needs_apiserver,
    running_apiserver,
)
from tests.registry.following import following, ids, until
from tests.service.engines import wait_until
from tests.service.fleet.published import fleet

__all__ = ["running_apiserver"]
NAME = "kv-kvgrpc-fleet"
Bodies = dict[tuple[str, str], dict[str, Any]]
pytestmark = needs_apiserver


def chart(*values: str) -> Bodies:
    try:
        return {(row.kind, row.name): row.body for row in rendered(found_in(), *values)}
    except Missing as missing:
        pytest.skip(str(missing))


def container(bodies: Bodies) -> dict[str, Any]:
    (found,) = bodies["Deployment", NAME]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def account(server: RunningApiServer, bodies: Bodies, folder: Path) -> Path:
    """Makes the service account with its rights, and returns what its pod would have of it."""
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    for kind, path in (
        ("ServiceAccount", accounts),
        ("Role", f"{ROLES}/roles"),
        ("RoleBinding", f"{ROLES}/rolebindings"),
    ):
        server.call("DELETE", path)
        server.call("POST", path, bodies[kind, NAME])
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    folder = server.account().rename(folder / "account")
    (folder / "token").write_text(server.call("POST", f"{accounts}/{NAME}/token", asked)["status"]["token"])
    return folder


def serve_pods(server: RunningApiServer, bodies: Bodies) -> None:
    """Does for every Service what Kubernetes does: writes a slice with its labels, its annotations and one pod."""
    server.empty()
    services = [body for (kind, _), body in bodies.items() if kind == "Service"]
    for number, service in enumerate(services, 1):
        head = service["metadata"]
        ports = [{"name": port["name"], "port": port["port"]} for port in service["spec"]["ports"]]
        labels = head["labels"] | {"kubernetes.io/service-name": head["name"]}
        made = {"name": head["name"], "labels": labels, "annotations": head.get("annotations", {})}
        pods = [endpoint(f"{head['name']}-0", f"10.244.0.{number}")]
        server.call("POST", SLICES, {"metadata": made, "addressType": "IPv4", "ports": ports, "endpoints": pods})


def allowed(server: RunningApiServer) -> set[str]:
    """Returns what the service account may do, of all that is asked here."""
    user, found = f"system:serviceaccount:{NAMESPACE}:{NAME}", set()
    for group, resource in (("discovery.k8s.io", "endpointslices"), ("coordination.k8s.io", "leases"), ("", "secrets")):
        for verb in ("list", "watch", "get", "create", "update", "patch", "delete"):
            for namespace in (NAMESPACE, "default"):
                what = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
                asked = {"spec": {"user": user, "resourceAttributes": what}}
                if server.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", asked)["status"][
                    "allowed"
                ]:
                    found.add(f"{verb} {resource} in {namespace}")
    return found


def found_by(registry: str, server: RunningApiServer) -> dict[str, EngineRole]:
    """Returns the roles of the leads of a registry, by their addresses."""

    async def introduce(address: str) -> EngineEntry:
        return entry(address, life=0, role=EngineRole.BOTH)

    async def read() -> dict[str, EngineRole]:
        async with following(registry_at(registry, introduce, server.environment())) as directory:
            await until(lambda: directory.complete and len(ids(directory)) >= 2)
            return {one.entry.engine_id: one.entry.role for one in directory}

    return asyncio.run(read())


@pytest.mark.parametrize("trust", [(), INSECURE], ids=["tls", "plain"])
def test_the_account_finds_the_leads_of_its_release_and_may_do_nothing_else(
    trust: tuple[str, ...], running_apiserver: RunningApiServer, tmp_path: Path
) -> None:
    bodies = chart("fleet.enabled=true", *trust)
    folder = account(running_apiserver, bodies, tmp_path)
    assert allowed(running_apiserver) == {f"{verb} endpointslices in {NAMESPACE}" for verb in ("list", "watch")}
    serve_pods(running_apiserver, bodies)
    config = settings(container(bodies))
    found = found_by(f"{config.fleet.registry}&account={folder}", running_apiserver)
    assert sorted(role.name for role in found.values()) == ["DECODE", "PREFILL"]
    assert [address for address in found if not config.may_dial(address)] == []
    assert all(address.startswith("10.244.0." if trust else "kv-kvgrpc-") for address in found)


def test_the_account_reads_leases_where_they_are_the_registry(
    running_apiserver: RunningApiServer, tmp_path: Path
) -> None:
    account(running_apiserver, chart("fleet.enabled=true", "fleet.registry=kubernetes-leases://"), tmp_path)
    assert allowed(running_apiserver) == {f"{verb} leases in {NAMESPACE}" for verb in ("list", "watch")}


def test_a_server_with_the_variables_of_the_deployment_passes_its_probes(
    running_apiserver: RunningApiServer, tmp_path: Path
) -> None:
    bodies = chart(*INSECURE, *PICKER)
    folder = account(running_apiserver, bodies, tmp_path)
    serve_pods(running_apiserver, bodies)
    one = container(bodies)
    variables = {row["name"]: row["value"] for row in one["env"]}
    registry = f"{variables['KVGRPC_FLEET_REGISTRY']}&account={folder}"
    flags = ("--registry", registry, "--metrics", "127.0.0.1:0", "--dial-allow", "127.0.0.0/8")
    with fleet(tmp_path / "fleet", *flags, **variables, **running_apiserver.environment()) as found:
        service = one["readinessProbe"]["grpc"]["service"]
        with grpc.insecure_channel(found["address"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service=service)
            wait_until(lambda: health.Check(asked, timeout=10).status == health_pb2.HealthCheckResponse.SERVING)
        lives = f"http://{found['metrics']}{one['livenessProbe']['httpGet']['path']}"
        assert urllib.request.urlopen(lives, timeout=10).status == 200
