"""The chart where a mistake would start well: which port prefill has, who has which role, and who is dialled."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import connect_sync
from kvgrpc.fleet.entry import EngineRole
from kvgrpc.service.gateway.http_endpoints import HttpEndpoints
from kvgrpc.service.identity.assignments import assignments_of
from kvgrpc.service.identity.roles import Role
from kvgrpc.v1.handshake_pb2 import ADMISSION_DRAINING
from tests.client.serving import served
from tests.fleet.entries import entry
from tests.operators.manifests import CHART, INSECURE, PICKER, REFUSED, ROLES, refusal, rendered, settings
from tests.operators.programs import Missing, Programs, found_in
from tests.service.engines import wait_until

WAIT_S = 60


def example_of_roles() -> str:
    """Returns the example of `tls.roles` in the values."""
    _, _, after = (CHART / "values.yaml").read_text().partition("Example:\n")
    return "\n".join(line.strip().removeprefix("#") for line in after.partition("  roles: ")[0].splitlines())


@pytest.fixture
def programs() -> Programs:
    found = found_in()
    try:
        for name in ("helm", "kubernetes", "crds"):
            found.need(name)
    except Missing as missing:
        pytest.skip(str(missing))
    return found


def container(programs: Programs, kind: str, name: str, *values: str) -> dict[str, Any]:
    """Returns the first container of a manifest."""
    (found,) = [row.body for row in rendered(programs, *values) if (row.kind, row.name) == (kind, name)]
    return dict(found["spec"]["template"]["spec"]["containers"][0])


@pytest.mark.parametrize("text", [example_of_roles(), ROLES.replace("\\,", ",")], ids=["values.yaml", "cases"])
def test_servers_of_the_fleet_are_routers_and_leads_are_peers_that_drain(text: str) -> None:
    found = assignments_of(text.encode())
    accounts = {name: found.of(f"spiffe://cluster.local/ns/llm/sa/kv-kvgrpc-{name}") for name in ("fleet", "decode")}
    assert accounts["fleet"].roles == {Role.ROUTER}
    assert accounts["decode"].roles == {Role.PEER, Role.OPERATOR}


async def test_the_picker_sends_to_the_sidecar_of_decode_and_names_the_engines_own_port_of_prefill(
    programs: Programs,
) -> None:
    ports = ("ports.http=8100", "fleet.picker.port=8001")
    config = settings(container(programs, "Deployment", "kv-kvgrpc-fleet", *INSECURE, *PICKER, *ports))
    endpoints, lead = HttpEndpoints(config.fleet.http_rules), entry("kv-kvgrpc-x-0", addresses=("10.244.0.7:50051",))
    assert await endpoints.of(lead, EngineRole.PREFILL) == "10.244.0.7:8100"
    assert await endpoints.of(lead, EngineRole.DECODE) == "10.244.0.7:8001"


def test_without_engines_only_what_is_allowed_beside_them_is_dialled(programs: Programs) -> None:
    allowed = ("prefill.replicas=0", "decode.replicas=0", "lead.dialAllow={10.0.0.0/8,router.example}")
    one = container(programs, "Deployment", "kv-kvgrpc-fleet", "fleet.enabled=true", *allowed)
    assert settings(one).dial_allow == ("10.0.0.0/8", "router.example")


def test_an_engine_beside_its_lead_ends_after_the_drain(programs: Programs, tmp_path: Path) -> None:
    (pod,) = (
        row.body["spec"]["template"]["spec"]
        for row in rendered(programs, "lead.sidecar=true", "lead.drainSeconds=100", *INSECURE)
        if (row.kind, row.name) == ("StatefulSet", "kv-kvgrpc-prefill")
    )
    (lead,), (engine, *_) = pod["initContainers"], pod["containers"]
    mark = tmp_path / "drained"
    mark.touch()  # an earlier run of the lead's container has drained

    with served("--drain-s", "0") as server, connect_sync(server.address) as client:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

        def begun(container: dict[str, Any], hook: str) -> "subprocess.Popen[bytes]":
            *shell, script = container["lifecycle"][hook]["exec"]["command"]
            command = [*shell, script.replace("/run/kvgrpc/", f"{tmp_path}/")]
            return subprocess.Popen(command, env=os.environ | {"LEAD_ADDRESS": server.address, "PATH": path})

        assert begun(lead, "postStart").wait(WAIT_S) == 0
        assert not mark.exists()
        lease = client.grant_lease(client.allocate(1), list(range(16)), ttl_s=300).lease.lease_id
        with begun(lead, "preStop") as drains, begun(engine, "preStop") as waits:
            wait_until(lambda: client.status().admission == ADMISSION_DRAINING)
            assert (drains.poll(), waits.poll()) == (None, None)
            client.release_lease(lease)
            assert (drains.wait(WAIT_S), waits.wait(WAIT_S)) == (0, 0)


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_work_is_refused(case: str, programs: Programs) -> None:
    why, values = REFUSED[case]
    assert why in refusal(programs, *values)
