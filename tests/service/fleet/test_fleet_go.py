"""The Go client's resolver before real leads, a real etcd and `kvgrpc fleet`: calls go to healthy engines only."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvgrpc.client import connect_sync
from kvgrpc.v1 import fleet_pb2 as pb
from tests.registry.etcds import RunningEtcd, etcd, needs_etcd
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until
from tests.service.fleet.published import environment, flags, fleet

__all__ = ["etcd"]

GO = shutil.which("go")
HERE = Path(__file__).resolve().parents[3] / "clients" / "go"
MANY = 60
"""Number of calls in a row that show where calls go."""
pytestmark = [needs_etcd, pytest.mark.skipif(GO is None, reason="go is not on the PATH")]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("go") / "fleet"
    subprocess.run([str(GO), "build", "-o", made, "./samples/fleet"], cwd=HERE, check=True)
    return made


class Calls:
    """The rows of the sample: when each call ended, and the engine that answered or an error."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def rows(self) -> list[tuple[float, str]]:
        whole = self._log.read_text().rpartition("\n")[0].splitlines()
        return [(float(row.partition(" ")[0]), row.partition(" ")[2]) for row in whole]

    def reach(self, *engine_ids: str) -> None:
        """Waits until many calls in a row, all of them after this moment, reach all of these engines and no other."""
        begun = time.time()

        def last() -> list[str]:
            return [engine for at, engine in self.rows() if at > begun][-MANY:]

        wait_until(lambda: len(last()) == MANY and set(last()) == set(engine_ids), what=lambda: self.rows()[-MANY:])


@contextmanager
def calling(sample: Path, folder: Path, fleets: Sequence[str], *more: str) -> Iterator[Calls]:
    """Calls all the time, every 2 milliseconds."""
    log = folder / "calls"
    command = [str(sample), "-fleet", ",".join(fleets), "-model", "m", "-every", "2ms", *more]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out) as process:
        try:
            yield Calls(log)
        finally:
            process.terminate()


def states(address: str) -> dict[str, pb.EngineState.ValueType]:
    with connect_sync(address) as client:
        return {one.engine_id: one.state for one in client.fleet().engines().engines}


def drain(engine: Engine) -> None:
    with connect_sync(engine.address) as client:
        client.start_drain()


def test_calls_leave_engines_that_drain_and_die_and_outlive_servers_of_the_fleet(
    start: Start, etcd: RunningEtcd, sample: Path, tmp_path: Path
) -> None:
    settings = environment(etcd)
    registry = ("--registry", settings["KVGRPC_FLEET_REGISTRY"])
    a, b, c = start(*(flags(name, "--fleet-role", "decode", "--fleet-model", "m") for name in "abc"), **settings)
    start(flags("p", "--fleet-role", "prefill", "--fleet-model", "m"), **settings)
    with ExitStack() as stack:
        one = stack.enter_context(ExitStack())
        first = one.enter_context(fleet(tmp_path / "one", *registry))["address"]
        other = stack.enter_context(fleet(tmp_path / "other", *registry))["address"]
        wait_until(lambda: states(first) == dict.fromkeys("abcp", pb.ENGINE_STATE_HEALTHY))
        calls = stack.enter_context(calling(sample, tmp_path, (first, other), "-role", "decode"))
        calls.reach("a", "b", "c")

        drain(a)
        wait_until(lambda: states(first)["a"] == pb.ENGINE_STATE_DRAINING)
        calls.reach("b", "c")

        one.close()
        calls.reach("b", "c")
        with connect_sync(a.address) as client:
            client.cancel_drain()
        calls.reach("a", "b", "c")

        b.process.kill()
        calls.reach("a", "c")
        wait_until(lambda: states(other).get("b") != pb.ENGINE_STATE_HEALTHY)
        calls.reach("a", "c")

        again = stack.enter_context(ExitStack())
        again.enter_context(fleet(tmp_path / "again", *registry))
        c.process.end()
        calls.reach("a")
    errors = [row for row in calls.rows() if row[1].startswith("error")]
    assert errors == [], "a call failed, though an engine was there all the time"


def test_a_call_that_names_an_engine_reaches_it_while_it_drains(
    start: Start, etcd: RunningEtcd, sample: Path, tmp_path: Path
) -> None:
    settings = environment(etcd)
    a, _ = start(*(flags(name, "--fleet-model", "m") for name in "ab"), **settings)
    with fleet(tmp_path / "one", "--registry", settings["KVGRPC_FLEET_REGISTRY"]) as found:
        wait_until(lambda: states(found["address"]).get("a") == pb.ENGINE_STATE_HEALTHY)
        drain(a)
        wait_until(lambda: states(found["address"]).get("a") == pb.ENGINE_STATE_DRAINING)
        with calling(sample, tmp_path, (found["address"],), "-engine", "a") as calls:
            calls.reach("a")
