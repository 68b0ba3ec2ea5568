"""Reading a registry costs nothing while nobody asks, and a bounded amount while somebody does."""

import asyncio
import json
from pathlib import Path

import grpc.aio
import pytest

from kvgrpc.config_fleet import FleetConfig
from kvgrpc.errors import Unavailable, Unimplemented
from kvgrpc.fleet.directory import Directory, DirectoryLimits, EngineState, HealthCheck
from kvgrpc.service.fleet import lead_checks, reader
from kvgrpc.service.fleet.lead_checks import LeadChecks, load_of
from kvgrpc.service.fleet.reader import FleetReader
from kvgrpc.v1 import handshake_pb2
from tests.service.conftest import Start
from tests.service.fleet.readings import connect, until


def state_of(directory: Directory, engine_id: str, now: float) -> EngineState | None:
    one = directory.find(engine_id)
    return None if one is None else directory.state(one, now)


def made(path: Path, *, always: bool = False) -> FleetReader:
    path.write_text(json.dumps({"engines": [{"engine_id": "a", "addresses": ["127.0.0.1:1"]}]}))
    return FleetReader(FleetConfig(registry=f"file:{path}"), connect, lambda _: True, always=always)


async def test_a_registry_is_read_from_the_first_caller_on_until_nobody_has_asked_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "IDLE_S", 0.2)
    one = made(tmp_path / "engines.json")
    assert one.present is None
    first = await one.reading()
    with one.watching():
        await asyncio.sleep(0.5)  # longer than a reader without a watch would read
        assert await one.reading() is first
    await until(lambda: one.present is None)
    second = await one.reading()
    assert second.name != first.name
    await one.stop()
    assert one.present is None


async def test_a_reader_that_always_reads_ends_with_its_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "IDLE_S", 0.0)
    one = made(tmp_path / "engines.json", always=True)
    first = await one.reading()
    assert await one.reading() is first
    await one.stop()


async def test_news_of_the_registry_after_a_quiet_time_wait_for_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LOOK_S", 3_600.0)
    monkeypatch.setattr(reader, "LISTING_S", 30.0)
    one = made(tmp_path / "engines.json")
    assert len((await one.reading()).history.by_key()) == 1
    await one.stop()


async def test_a_registry_that_cannot_be_read_is_unavailable_and_none_is_unimplemented(tmp_path: Path) -> None:
    lost = FleetConfig(registry="etcd://127.0.0.1:1", etcd_ca=str(tmp_path / "gone"))
    with pytest.raises(Unavailable, match="gone"):
        await FleetReader(lost, connect, lambda _: True).reading()
    with pytest.raises(Unimplemented):
        await FleetReader(FleetConfig(), connect, lambda _: True).reading()


async def test_connections_for_checks_are_bounded_and_those_that_fail_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lead_checks, "CHANNELS_MAX", 2)
    opened: list[str] = []

    def counted(address: str, name: str) -> grpc.aio.Channel:
        opened.append(address)
        return connect(address, name)

    checks, directory = LeadChecks(counted, lambda _: True), Directory()
    row = {"engine_id": "a", "addresses": ["127.0.0.1:1"]}
    directory.listed([("k", json.dumps(row).encode(), 1)])
    check = HealthCheck("k", "a", 0, "127.0.0.1:1")
    for _ in range(2):
        assert not await checks.ask(directory, check)
    assert opened == ["127.0.0.1:1"] * 2
    (one,) = directory
    assert "does not answer: UNAVAILABLE" in directory.why(one, 0.0)
    assert directory.state(one, 0.0) is EngineState.UNPROVEN, "the follower says that it failed"
    await checks.close()


def test_a_connection_is_kept_for_each_entry_that_a_directory_may_have() -> None:
    assert DirectoryLimits().entries == lead_checks.CHANNELS_MAX


async def test_a_killed_lead_is_known_before_its_next_check(start: Start, tmp_path: Path) -> None:
    (lead,) = await asyncio.to_thread(start, ("--engine-id", "a"))
    path = tmp_path / "engines.json"
    path.write_text(json.dumps({"engines": [{"engine_id": "a", "addresses": [lead.address]}]}))
    one = FleetReader(FleetConfig(registry=f"file:{path}", check_every_s=10.0), connect, lambda _: True)
    directory, now = (await one.reading()).directory, asyncio.get_running_loop().time
    try:
        await until(lambda: state_of(directory, "a", now()) is EngineState.HEALTHY)
        due = min(one.check_at for one in directory)
        lead.process.kill()
        await until(lambda: state_of(directory, "a", now()) is EngineState.FAILED)
        assert now() < due
    finally:
        await one.stop()


def test_a_load_is_the_share_of_the_fullest_group_and_of_what_waits() -> None:
    groups = [
        handshake_pb2.GroupLoad(block_count=100, free_block_count=50, soft_block_count=25),
        handshake_pb2.GroupLoad(block_count=100, free_block_count=90, soft_block_count=90),
        handshake_pb2.GroupLoad(),
    ]
    assert load_of(handshake_pb2.EngineStatus(groups=groups)) == 0.25
    assert load_of(handshake_pb2.EngineStatus(waiting_turn_count=8)) == 0.5
