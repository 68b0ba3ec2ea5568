"""Leads publish themselves in a real etcd, and serve whatever becomes of it."""

import signal
import subprocess
from pathlib import Path

from kvgrpc.v1 import admin_pb2
from kvgrpc.wire.frames import encode
from tests.cli.commands import run
from tests.engine.session_client import ATTACH, Client
from tests.registry.etcds import RunningEtcd, etcd, needs_etcd
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until
from tests.service.fleet.published import entries, environment, flags, key_of

__all__ = ["etcd"]
pytestmark = needs_etcd


def publication(engine: Engine) -> admin_pb2.Publication:
    return engine.api.admin.GetStatus(admin_pb2.GetStatusRequest()).publication


def test_a_lead_publishes_who_it_is_and_takes_itself_out_when_it_ends(start: Start, etcd: RunningEtcd) -> None:
    more = {"KVGRPC_FLEET_MODEL": "llama", "KVGRPC_FLEET_ROLE": "prefill", "KVGRPC_FLEET_HOST": "node-1"}
    (lead,) = start(flags("p1"), **environment(etcd), **more)
    wait_until(lambda: publication(lead).published)
    assert publication(lead).registry == f"etcd://{etcd.address}"
    assert f"registry etcd://{etcd.address}: published" in run("status", lead.address)[1]
    found = entries(etcd)
    assert found.keys() == {key_of(lead)}
    entry = found[key_of(lead)]
    assert (entry["engine_id"], entry["addresses"], entry["incarnation"]) == ("p1", [lead.address], lead.incarnation())
    assert (entry["role"], entry["model_name"], entry["host"], entry["data_paths"]) == (
        "prefill", "llama", "node-1", ["shm"],
    )  # fmt: skip
    assert all(entry[name] for name in ("model", "layout", "version"))
    assert not entry["draining"]
    lead.process.end()
    wait_until(lambda: not entries(etcd))


def test_engines_of_one_model_and_layout_publish_equal_digests(start: Start, etcd: RunningEtcd) -> None:
    rows = (
        flags("a"),
        flags("b", "--blocks", "64"),
        flags("c", "--dtype", "bfloat16"),
        flags("d", "--weights-revision", "2"),
    )
    leads = start(*rows, **environment(etcd))
    wait_until(lambda: all(publication(lead).published for lead in leads))
    found = {entry["engine_id"]: entry for entry in entries(etcd).values()}
    assert {name for name in found if found[name]["layout"] == found["a"]["layout"]} == {"a", "b", "d"}
    assert {name for name in found if found[name]["model"] == found["a"]["model"]} == {"a", "b", "c"}


def test_an_entry_says_that_its_engine_drains(start: Start, etcd: RunningEtcd) -> None:
    (lead,) = start(flags("p1"), **environment(etcd))
    wait_until(lambda: publication(lead).published)
    lead.api.admin.StartDrain(admin_pb2.StartDrainRequest())
    wait_until(lambda: entries(etcd)[key_of(lead)]["draining"])
    lead.api.admin.CancelDrain(admin_pb2.CancelDrainRequest())
    wait_until(lambda: not entries(etcd)[key_of(lead)]["draining"])


def test_a_killed_lead_leaves_with_its_lease_and_its_next_life_is_a_newer_one(start: Start, etcd: RunningEtcd) -> None:
    (lead,) = start(flags("p1"), **environment(etcd))
    wait_until(lambda: publication(lead).published)
    ((key, killed),) = entries(etcd).items()
    lead.process.kill()
    (again,) = start(flags("p1"), **environment(etcd))
    wait_until(lambda: publication(again).published)
    assert entries(etcd)[key_of(again)]["life"] > killed["life"]
    wait_until(lambda: key not in entries(etcd))
    assert key_of(again) in entries(etcd)


def test_an_engine_that_attaches_is_published_in_place_of_the_embedded_pool(
    start: Start, etcd: RunningEtcd, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    (lead,) = start(flags("p1", "--session-socket", path), **environment(etcd))
    wait_until(lambda: publication(lead).published)
    (before,) = entries(etcd)
    engine = Client(path)
    engine.socket.sendall(encode(ATTACH))
    engine.receive()
    wait_until(lambda: entries(etcd).keys() == {key_of(lead)})
    assert before != key_of(lead)
    engine.socket.close()
    wait_until(lambda: entries(etcd).keys() == {key_of(lead)})


def test_a_lead_serves_while_its_registry_is_away_and_is_published_when_it_comes_back(
    start: Start, etcd: RunningEtcd
) -> None:
    (lead,) = start(flags("p1"), **environment(etcd))
    wait_until(lambda: publication(lead).published)
    etcd.end()
    wait_until(lambda: bool(publication(lead).failure))
    assert not publication(lead).published
    lead.check_alive()
    lead.allocate(1)
    etcd.start()
    wait_until(lambda: publication(lead).published)
    wait_until(lambda: entries(etcd).keys() == {key_of(lead)})
    assert lead.process.log.count("is not renewed in etcd") == 1


def test_a_lead_starts_and_ends_while_its_registry_stands_still(start: Start, etcd: RunningEtcd) -> None:
    wait_until(lambda: entries(etcd) == {})
    etcd.signal(signal.SIGSTOP)
    try:
        (lead,) = start(flags("p1"), **environment(etcd))
        lead.check_alive()
        wait_until(lambda: bool(publication(lead).failure))
        lead.process.end()
    finally:
        etcd.signal(signal.SIGCONT)


def test_a_lead_shows_its_password_to_etcd(start: Start, etcd: RunningEtcd, tmp_path: Path) -> None:
    wait_until(lambda: entries(etcd) == {})
    wait_until(lambda: "OK" in _said(etcd, "put", "x", "y"))
    etcd.ctl("user", "add", "root:secret")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("auth", "enable")
    (tmp_path / "password").write_text("secret\n")
    more = {"KVGRPC_FLEET_ETCD_USER": "root", "KVGRPC_FLEET_ETCD_PASSWORD_FILE": str(tmp_path / "password")}
    known, unknown = (start(flags(name), **environment(etcd), **said)[0] for name, said in (("a", more), ("b", {})))
    wait_until(lambda: publication(known).published)
    wait_until(lambda: bool(publication(unknown).failure))
    assert "secret" not in known.process.log + unknown.process.log


def _said(etcd: RunningEtcd, *arguments: str) -> str:
    try:
        return etcd.ctl(*arguments)
    except subprocess.SubprocessError:
        return ""


def test_without_a_registry_nothing_is_published(source: Engine) -> None:
    status = source.api.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert not status.HasField("publication")
