"""A real etcd that fails in each way it has: members that stop or die, revisions that are compacted, tokens that end,
and entries that lie. What was known stays known, and what has gone is dropped.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest

from examples.certs import Authority, usual_names
from kvgrpc.fleet.directory import Directory, EngineState
from kvgrpc.registry.base import RegistryDown, RegistryListing, RegistryNews
from kvgrpc.registry.etcd import EtcdRegistry, EtcdSettings
from kvgrpc.tls import TlsFiles
from tests.chaos.network import Proxy
from tests.fleet.entries import entry
from tests.registry.etcds import EtcdCluster, RunningEtcd, cluster, etcd, needs_etcd
from tests.registry.following import following, ids, until
from tests.registry.publishing import published

__all__ = ["cluster", "etcd"]
pytestmark = needs_etcd


def settings(*addresses: str, **changes: object) -> EtcdSettings:
    return replace(EtcdSettings(addresses, timeout_s=1.0, ttl_s=2, probe_s=0.5), **changes)  # type: ignore[arg-type] # settings


def put(member: RunningEtcd, name: str, **changes: object) -> None:
    member.ctl("put", f"/kvgrpc/v1/engines/{name}/7", entry(name, **changes).to_json().decode())


def state(directory: Directory, engine_id: str) -> EngineState | None:
    one = directory.find(engine_id)
    return None if one is None else directory.state(one, asyncio.get_running_loop().time())


def stale(directory: Directory) -> bool:
    return directory.stale_s(0.0) is not None


# -- what a watch may miss


async def test_what_went_while_revisions_were_compacted_is_gone_in_the_next_listing(etcd: RunningEtcd) -> None:
    put(etcd, "stays")
    put(etcd, "goes")
    registry = EtcdRegistry(settings(etcd.address))
    try:
        async with contextlib.aclosing(registry.watch()) as news:  # type: ignore[type-var] # a generator
            assert listed(await anext(news)) == ["goes", "stays"]
            # The watch begins after the listing: what happens meanwhile is compacted before it asks.
            etcd.ctl("del", "/kvgrpc/v1/engines/goes/7")
            put(etcd, "comes")
            put(etcd, "comes", draining=True)
            etcd.ctl("compact", str(etcd.revision()))
            with pytest.raises(RegistryDown, match="compacted"):
                await anext(news)
        async with contextlib.aclosing(registry.watch()) as news:  # type: ignore[type-var] # a generator
            assert listed(await anext(news)) == ["comes", "stays"]
    finally:
        await registry.close()


async def test_a_follower_that_lags_behind_a_compaction_ends_with_what_there_is(etcd: RunningEtcd) -> None:
    put(etcd, "stays")
    put(etcd, "goes")
    registry = LaggingRegistry(EtcdRegistry(settings(etcd.address)))
    async with following(registry) as directory:
        await until(lambda: ids(directory) == ["goes", "stays"])
        etcd.ctl("del", "/kvgrpc/v1/engines/goes/7")
        put(etcd, "comes")
        etcd.ctl("compact", str(etcd.revision()))
        registry.go_on.set()
        await until(lambda: ids(directory) == ["comes", "stays"])
        assert directory.stale_s(0.0) is None


async def test_an_entry_that_went_while_the_connection_was_cut_is_dropped_when_it_comes_back(etcd: RunningEtcd) -> None:
    """The cut swallows: both ends keep their connection, and nothing comes through."""
    put(etcd, "stays")
    put(etcd, "goes")
    proxy = Proxy()
    host, port = etcd.address.split(":")
    proxy.target = (host, int(port))
    try:
        async with following(EtcdRegistry(settings(proxy.address))) as directory:
            await until(lambda: ids(directory) == ["goes", "stays"])
            proxy.cut()
            await until(partial(stale, directory))
            etcd.ctl("del", "/kvgrpc/v1/engines/goes/7")
            assert ids(directory) == ["goes", "stays"]
            proxy.mend()
            await until(lambda: ids(directory) == ["stays"] and not stale(directory))
    finally:
        proxy.close()


class LaggingRegistry:
    """A registry whose reader takes nothing after the first listing until it may go on."""

    def __init__(self, registry: EtcdRegistry) -> None:
        self._registry = registry
        self.go_on = asyncio.Event()

    async def watch(self) -> AsyncIterator[RegistryNews]:
        async with contextlib.aclosing(self._registry.watch()) as news:  # type: ignore[type-var] # a generator
            async for one in news:
                yield one
                await self.go_on.wait()

    async def close(self) -> None:
        await self._registry.close()


def listed(news: RegistryNews) -> list[str]:
    assert isinstance(news, RegistryListing)
    return sorted(key.split("/")[-2] for key, _, _ in news.entries)


# -- members that stop and die


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("at_the_leader", [True, False])
async def test_a_leader_that_stops_and_one_that_dies_drop_no_engine(cluster: EtcdCluster, at_the_leader: bool) -> None:
    led = await eventually(cluster.leader)
    addresses = sorted(cluster.addresses, key=lambda one: (one == led.address) is not at_the_leader)
    known = settings(*addresses, ttl_s=6)
    async with following(EtcdRegistry(known)) as directory, published(known, entry("a")), published(known, entry("b")):
        await until(lambda: ids(directory) == ["a", "b"])
        with never_without(directory, "a", "b"):
            led.signal(signal.SIGSTOP)
            try:
                await seen_again(await eventually(cluster.leader), directory, "while-it-stops")
            finally:
                led.signal(signal.SIGCONT)
            led = await eventually(cluster.leader)
            # What is not renewed from now on ends with this entry, at the latest.
            lease = led.ctl("lease", "grant", "6").split()[1]
            led.ctl("put", "--lease", lease, "/kvgrpc/v1/engines/unrenewed/7", entry("unrenewed").to_json().decode())
            await until(lambda: "unrenewed" in ids(directory))
            led.end()
            await seen_again(await eventually(cluster.leader), directory, "after-its-death")
            await until(lambda: "unrenewed" not in ids(directory))


async def seen_again(member: RunningEtcd, directory: Directory, engine_id: str) -> None:
    """Puts an entry, and waits until the directory shows it."""
    await asyncio.to_thread(put, member, engine_id)
    await until(lambda: engine_id in ids(directory) and directory.stale_s(0.0) is None)


async def eventually(found: Callable[[], RunningEtcd]) -> RunningEtcd:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(LookupError):
                return await asyncio.to_thread(found)
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def never_without(directory: Directory, *names: str) -> Iterator[None]:
    """Fails if an engine was dropped meanwhile, also for a moment: then it would be listed as another object."""
    before = [directory.find(name) for name in names]
    yield
    assert None not in before
    assert all(directory.find(name) is one for name, one in zip(names, before, strict=True))


# -- who may read and write


def secured(folder: Path, options: tuple[str, ...] = ()) -> tuple[RunningEtcd, TlsFiles, EtcdSettings]:
    authority = Authority()
    server, client = (authority.issue(folder / name, usual_names(name)) for name in ("server", "client"))
    made = RunningEtcd(folder / "etcd", options, server)
    trusted = grpc.ssl_channel_credentials(client.ca.read_bytes(), client.key.read_bytes(), client.cert.read_bytes())
    return made, client, settings(made.address, credentials=trusted)


async def demand_a_password(member: RunningEtcd, files: TlsFiles | None = None) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(member.ctl, "put", "x", "y", files=files)
                break
    for command in (("user", "add", "root:secret"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
        member.ctl(*command, files=files)


async def test_a_certificate_and_a_password_are_both_shown(tmp_path: Path) -> None:
    member, files, known = secured(tmp_path)
    member.start()
    try:
        await demand_a_password(member, files)
        right = replace(known, user="root", password="secret")
        async with following(EtcdRegistry(right)) as directory, published(right, entry("a")):
            await until(lambda: ids(directory) == ["a"])
        foreign = Authority().issue(tmp_path / "foreign", usual_names("foreign"))
        for wrong in (
            known,  # no password
            replace(right, password="guess"),
            replace(right, credentials=None),  # no TLS
            replace(right, credentials=grpc.ssl_channel_credentials(files.ca.read_bytes())),  # no certificate
            replace(right, credentials=grpc.ssl_channel_credentials(  # a certificate of a foreign CA
                files.ca.read_bytes(), foreign.key.read_bytes(), foreign.cert.read_bytes()
            )),
            replace(right, credentials=grpc.ssl_channel_credentials(  # an etcd whose CA nobody here trusts
                foreign.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
            )),
        ):  # fmt: skip
            async with following(EtcdRegistry(wrong)) as directory:
                await until(partial(stale, directory))
                assert not directory.complete
    finally:
        member.end()


@pytest.mark.slow
async def test_a_token_that_ends_is_asked_for_anew_and_the_watch_goes_on(tmp_path: Path) -> None:
    member = RunningEtcd(tmp_path / "etcd", ("--auth-token-ttl", "1"))
    member.start()
    try:
        await demand_a_password(member)
        # Between two renewals more time passes than a token lasts.
        known = settings(member.address, user="root", password="secret", ttl_s=9, probe_s=2.0)
        async with following(EtcdRegistry(known)) as directory, published(known, entry("a")) as mine:
            await until(lambda: ids(directory) == ["a"])
            with never_without(directory, "a"):
                for draining in (True, False):
                    await until_token_ended(member)
                    mine.update(entry("a", draining=draining))
                    await until(partial(drains, directory, draining))
                    await until(mine.published.is_set)
    finally:
        member.end()


def drains(directory: Directory, draining: bool) -> bool:
    return [one.entry.draining for one in directory] == [draining]


async def until_token_ended(member: RunningEtcd) -> None:
    """Waits for the end of a lease of the same time as a token's: both are etcd's own clock."""
    user = "--user=root:secret"
    lease = (await asyncio.to_thread(member.ctl, user, "lease", "grant", "2")).split()[1]
    async with asyncio.timeout(30):
        while "already expired" not in await asyncio.to_thread(member.ctl, user, "lease", "timetolive", lease):
            pass


# -- leads that stop, and entries that are not what they seem


async def test_a_lead_that_was_stopped_for_longer_than_its_lease_publishes_itself_again(etcd: RunningEtcd) -> None:
    async with following(EtcdRegistry(settings(etcd.address))) as directory:
        script = LEAD.format(address=etcd.address, entry=entry("a").to_json())
        lead = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        try:
            await until(lambda: ids(directory) == ["a"])
            lead.send_signal(signal.SIGSTOP)
            await until(lambda: not ids(directory))
            lead.send_signal(signal.SIGCONT)
            await until(lambda: ids(directory) == ["a"])
        finally:
            lead.kill()
            await lead.wait()


LEAD = """
import asyncio
from kvgrpc.fleet.entry import read_entry
from kvgrpc.registry.etcd import EtcdPublication, EtcdSettings
asyncio.run(EtcdPublication(EtcdSettings(({address!r},), ttl_s=2), read_entry({entry!r})).run())
"""


async def test_two_engines_with_one_id_are_both_seen_and_the_one_that_answers_counts(etcd: RunningEtcd) -> None:
    known = settings(etcd.address)
    first = entry("a", incarnation=1, life=1, addresses=("10.0.0.1:1",))
    second = entry("a", incarnation=2, life=2, addresses=("10.0.0.2:1",))
    async with following(EtcdRegistry(known)) as directory:
        async with published(known, first), published(known, second):
            await until(lambda: len(directory) == 2)
            assert ids(directory) == ["a", "a"]
            await until(lambda: in_use(directory) == second)
        await until(lambda: not len(directory))


def in_use(directory: Directory) -> object:
    one = directory.find("a")
    return one and state(directory, "a") is EngineState.HEALTHY and one.entry


async def test_an_entry_that_lies_about_its_address_is_never_used(etcd: RunningEtcd) -> None:
    """Whoever can write to etcd names the address of another engine, under its own id and under a foreign one."""
    put(etcd, "a", addresses=("10.0.0.1:1",))
    put(etcd, "liar", addresses=("10.0.0.1:1",))
    etcd.ctl("put", "/kvgrpc/v1/engines/a/9", entry("a", incarnation=9, life=99).to_json().decode())
    who_is_there = {"10.0.0.1:1": ("a", 7)}
    async with following(EtcdRegistry(settings(etcd.address)), is_there=who_is_there) as directory:
        await until(lambda: state(directory, "a") is EngineState.HEALTHY)
        await until(lambda: state(directory, "liar") is EngineState.FAILED)
        one = directory.find("a")
        assert one is not None
        assert one.entry.addresses == ("10.0.0.1:1",)


async def test_a_key_that_says_another_engine_id_than_its_value_is_read_by_its_value(etcd: RunningEtcd) -> None:
    etcd.ctl("put", "/kvgrpc/v1/engines/b/7", entry("a").to_json().decode())
    etcd.ctl("put", "/kvgrpc/v1/engines/junk/7", "no JSON")
    async with following(EtcdRegistry(settings(etcd.address))) as directory:
        await until(lambda: ids(directory) == ["a"])
        assert directory.refusals.unreadable == 1
        etcd.ctl("del", "/kvgrpc/v1/engines/b/7")
        await until(lambda: not ids(directory))


async def test_an_etcd_that_comes_back_empty_is_filled_again_by_those_who_live(
    etcd: RunningEtcd, tmp_path: Path
) -> None:
    known = settings(etcd.address)
    async with following(EtcdRegistry(known)) as directory, published(known, entry("a")):
        put(etcd, "nobody")
        await until(lambda: ids(directory) == ["a", "nobody"])
        etcd.end()
        empty = RunningEtcd(tmp_path / "empty")
        empty.address = etcd.address
        empty.start()
        try:
            await until(lambda: ids(directory) == ["a"] and directory.stale_s(0.0) is None)
        finally:
            empty.end()
