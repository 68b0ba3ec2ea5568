"""The router in Go with a fleet: a real etcd lists the engines, and `kvgrpc fleet` picks the pair of each request."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.examples.go_router import KINDS, NEEDS_GO, Router, binary, listening, running
from tests.examples.http_engines import HttpEngine, serving, until
from tests.registry.etcds import RunningEtcd, etcd, needs_etcd
from tests.service.conftest import Start, start
from tests.service.fleet.published import environment, flags, fleet

__all__ = ["binary", "etcd", "start"]

pytestmark = [*NEEDS_GO, needs_etcd]


def served(*engines: HttpEngine) -> list[int]:
    """Returns the number of requests that each engine got."""
    return [len(engine.computed) + len(engine.completed) for engine in engines]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_go_to_engines_that_the_fleet_knows_also_while_it_is_away(
    start: Start, etcd: RunningEtcd, binary: Path, tmp_path: Path, kind: str
) -> None:
    settings = environment(etcd)
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    rows = [flags(name, "--fleet-role", role, "--fleet-model", "m") for name, role in roles.items()]
    leads = start(*rows, **settings)
    with ExitStack() as stack:
        engines = [stack.enter_context(serving(lead.address)) for lead in leads]
        p0, p1, d0, d1 = engines
        asked = stack.enter_context(ExitStack())
        address = asked.enter_context(fleet(tmp_path / "f", "--registry", settings["KVGRPC_FLEET_REGISTRY"]))["address"]
        command = [str(binary), "-listen", "127.0.0.1:0", "-fleet", address, "-model", "m"]
        for name, engine in zip(roles, engines, strict=True):
            command += ["-http", f"{name}={kind},{engine.url}"]
        process = stack.enter_context(running(command, tmp_path / "router.log", {}))
        url = listening(process, tmp_path / "router.log", "router: ")
        router = Router(url, process, [p0, p1], [d0, d1], {lead.address: lead for lead in leads})

        def working() -> list[str]:
            return sorted(row["engine_id"] for row in router.health()["engines"] if row["takes_work"])

        until(lambda: working() == ["d0", "d1", "p0", "p1"], router.health)
        for seed in range(8):
            router.serves(seed)
        assert sum(served(p0, p1)) == sum(served(d0, d1)) == 8

        p0.client.start_drain()
        until(lambda: working() == ["d0", "d1", "p1"], router.health)
        before = served(p0)
        for seed in range(4):
            router.serves(seed)
        assert served(p0) == before, "an engine that drains got a request"

        router.kill(d0)
        for seed in range(4):
            router.serves(seed)
        until(lambda: working() == ["d1", "p1"], router.health)

        asked.close()
        before = served(p1, d1)
        for seed in range(4):
            router.serves(seed)
        assert served(p1, d1) == [count + 4 for count in before]
        router.at_rest(d0)
