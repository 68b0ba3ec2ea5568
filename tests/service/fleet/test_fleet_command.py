"""`kvgrpc fleet` beside a real etcd and real leads: several may run, and each may go."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from kvgrpc.client import connect_sync
from kvgrpc.v1 import fleet_pb2
from tests.e2e.otlp import collecting
from tests.registry.etcds import RunningEtcd, etcd, needs_etcd
from tests.service.api import Api
from tests.service.conftest import Start
from tests.service.engines import wait_until
from tests.service.fleet.conftest import EnginesFile
from tests.service.fleet.published import environment, flags, fleet

__all__ = ["etcd"]


def picked(address: str) -> tuple[str, str]:
    with connect_sync(address) as client:
        found = client.fleet().pick_pair()
        return found.prefill.engine.engine_id, found.decode.engine.engine_id


@needs_etcd
def test_two_of_them_show_the_same_leads_from_their_start_to_their_end(
    start: Start, etcd: RunningEtcd, tmp_path: Path
) -> None:
    settings = environment(etcd)
    prefill, decode = (start(flags(name, "--fleet-role", name), **settings)[0] for name in ("prefill", "decode"))
    more = ("--registry", settings["KVGRPC_FLEET_REGISTRY"])
    with fleet(tmp_path / "a", *more) as one, fleet(tmp_path / "b", *more, "--metrics", "127.0.0.1:0") as other:
        for found in (one, other):
            wait_until(lambda: picked(found["address"]) == ("prefill", "decode"))  # noqa: B023 - called at once
        assert picked(prefill.address) == ("prefill", "decode"), "a lead with a registry answers, too"
        decode.process.kill()
        for found in (one, other):
            wait_until(lambda: picked(found["address"]) == ("", ""))  # noqa: B023 - called at once
        shown = urllib.request.urlopen(f"http://{other['metrics']}/metrics", timeout=10).read().decode()
        assert 'kvgrpc_fleet_entries{state="healthy"} 1.0' in shown
        with connect_sync(other["address"]) as client:
            wait_until(lambda: len(client.fleet().engines().engines) == 1)
        prefill.process.end()
        with connect_sync(one["address"]) as client:
            wait_until(lambda: not client.fleet().engines().engines)


@needs_etcd
def test_an_etcd_that_goes_and_comes_back_changes_no_pair(start: Start, etcd: RunningEtcd, tmp_path: Path) -> None:
    settings = environment(etcd)
    start(flags("p", "--fleet-role", "prefill"), flags("d", "--fleet-role", "decode"), **settings)
    with fleet(tmp_path / "a", "--registry", settings["KVGRPC_FLEET_REGISTRY"]) as one:
        wait_until(lambda: picked(one["address"]) == ("p", "d"))
        api = Api(one["address"])
        etcd.end()
        wait_until(lambda: api.fleet.ListEngines(fleet_pb2.ListEnginesRequest()).HasField("registry_silence"))
        assert picked(one["address"]) == ("p", "d")
        etcd.start()
        wait_until(lambda: not api.fleet.ListEngines(fleet_pb2.ListEnginesRequest()).HasField("registry_silence"))
        wait_until(lambda: picked(one["address"]) == ("p", "d"))
        api.close()


def test_calls_have_spans_where_traces_are_exported(engines_file: EnginesFile, tmp_path: Path) -> None:
    registry = engines_file.environment["KVGRPC_FLEET_REGISTRY"]
    with collecting() as collector:
        exported = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        with fleet(tmp_path / "a", "--registry", registry, **exported) as one:
            api = Api(one["address"])
            watch = api.fleet.WatchEngines(fleet_pb2.WatchEnginesRequest())
            assert next(watch).snapshot
            watch.cancel()
            api.fleet.PickPair(fleet_pb2.PickPairRequest())
            api.close()
        port = one["address"].rpartition(":")[2]
        found = [(span.name.rpartition("/")[2], span.service.endswith(f":{port}")) for span in collector.spans]
        assert sorted(found) == [("PickPair", True), ("WatchEngines", True)]


@pytest.mark.parametrize(
    "flag", [(), ("--registry", "redis://x"), ("--registry", "etcd://127.0.0.1:1", "--roles", "/no")]
)
def test_settings_that_are_not_usable_end_it_with_one_line(flag: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "kvgrpc", "fleet", "--listen", "127.0.0.1:0", *flag]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_a_hangup_of_its_terminal_does_not_end_it(engines_file: EnginesFile, tmp_path: Path) -> None:
    with fleet(tmp_path / "a", "--registry", engines_file.environment["KVGRPC_FLEET_REGISTRY"]) as one:
        os.kill(int(one["pid"]), signal.SIGHUP)
        assert picked(one["address"]) == ("", "")


def test_health_says_whether_the_registry_has_answered(engines_file: EnginesFile, tmp_path: Path) -> None:
    engines_file.spoil()
    registry = engines_file.environment["KVGRPC_FLEET_REGISTRY"]
    with fleet(tmp_path / "a", "--registry", registry) as one:
        api = Api(one["address"])

        def health(name: str) -> int:
            return int(api.health.Check(health_pb2.HealthCheckRequest(service=name)).status)

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        wait_until(lambda: [health(name) for name in ("", "kvgrpc.v1.FleetService")] == [not_serving] * 2)
        engines_file.write([])
        wait_until(lambda: [health(name) for name in ("", "kvgrpc.v1.FleetService")] == [serving] * 2)
        header = api.fleet.ListEngines(fleet_pb2.ListEnginesRequest()).header
        assert header.engine_id == ""
        assert header.incarnation
        api.close()
