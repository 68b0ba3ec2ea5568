"""The Python client and the command line about a fleet, at a real lead."""

import json
from contextlib import aclosing

from kvgrpc.client import FleetEngines, connect, connect_sync
from kvgrpc.v1.fleet_pb2 import ENGINE_STATE_HEALTHY, EngineFilter
from tests.cli.commands import run
from tests.service.conftest import Start
from tests.service.engines import wait_until
from tests.service.fleet.conftest import EnginesFile, row

HEALTHY = EngineFilter(states=[ENGINE_STATE_HEALTHY])


def test_a_router_without_an_event_loop_lists_and_picks(start: Start, engines_file: EnginesFile) -> None:
    lead, other = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    engines_file.write([row(lead, role="prefill", model_name="m"), row(other, role="decode", model_name="m")])
    with connect_sync(lead.address) as client:
        fleet = client.fleet()
        wait_until(lambda: len(fleet.engines(HEALTHY).engines) == 2)
        found = fleet.pick_pair(model_name="m")
        assert (found.prefill.engine.engine_id, found.decode.engine.engine_id) == ("a", "b")
        assert not fleet.pick_pair(model_name="m", exclude=["b"]).HasField("prefill")
        for event in fleet.watch(HEALTHY):
            assert isinstance(event, FleetEngines)
            if {one.engine_id for one in event.engines.values()} == {"a", "b"}:
                break


async def test_a_watch_goes_on_at_a_server_that_came_back(start: Start, engines_file: EnginesFile) -> None:
    lead, other = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    engines_file.write([row(lead), row(other)])
    async with connect(lead.address) as client, aclosing(client.fleet().watch()) as events:

        async def until(*names: str) -> None:
            async for event in events:
                if isinstance(event, FleetEngines) and {one.engine_id for one in event.engines.values()} == {*names}:
                    return

        await until("a", "b")
        lead.process.kill()
        engines_file.write([row(other)])
        start(("--engine-id", "a", "--listen", lead.address), **engines_file.environment)
        await until("b")


def test_the_command_line_lists_a_fleet(start: Start, engines_file: EnginesFile) -> None:
    (lead,) = start(("--engine-id", "a"), **engines_file.environment)
    engines_file.write([row(lead, model_name="m"), row(lead, engine_id="other")])
    wait_until(lambda: "answers engine a" in "".join(run("get", "fleet", lead.address)[1]))
    code, (head, first, second), _ = run("get", "fleet", lead.address)
    assert code == 0
    assert head.split()[:4] == ["ENGINE", "STATE", "ROLE", "MODEL"]
    assert first.split()[:4] == ["a", "healthy", "both", "m"]
    assert second.split()[:2] == ["other", "failed"]
    rows = [json.loads(line) for line in run("get", "fleet", lead.address, "-o", "json")[1]]
    assert [one["engine_id"] for one in rows] == ["a", "other"]
