"""A real etcd: entries come and go, and none of what may happen to etcd takes an engine out of use."""

import asyncio
import signal
from dataclasses import replace

from kvgrpc.registry.etcd import EtcdPublication, EtcdRegistry, EtcdSettings
from tests.fleet.entries import entry
from tests.registry.etcds import RunningEtcd, etcd, needs_etcd
from tests.registry.following import following, ids, until
from tests.registry.publishing import published

__all__ = ["etcd"]
pytestmark = needs_etcd


def settings(of: RunningEtcd, **changes: object) -> EtcdSettings:
    return replace(EtcdSettings((of.address,), timeout_s=1.0, ttl_s=2, probe_s=0.5), **changes)  # type: ignore[arg-type] # settings


async def test_what_is_published_is_found_changed_and_withdrawn(etcd: RunningEtcd) -> None:
    async with following(EtcdRegistry(settings(etcd))) as directory:
        async with published(settings(etcd), entry("a")) as publication:
            await until(lambda: ids(directory) == ["a"])
            publication.update(entry("a", draining=True))
            await until(lambda: [one.entry.draining for one in directory] == [True])
        await until(lambda: not ids(directory))


async def test_an_entry_that_nobody_renews_ends_with_its_lease(etcd: RunningEtcd) -> None:
    async with following(EtcdRegistry(settings(etcd))) as directory, published(settings(etcd), entry("stays")):
        killed = EtcdPublication(settings(etcd), entry("killed"))
        running = asyncio.create_task(killed.run())
        await until(lambda: ids(directory) == ["killed", "stays"])
        running.cancel()
        await until(lambda: ids(directory) == ["stays"])
        await killed.withdraw()


async def test_a_lost_lease_is_granted_anew(etcd: RunningEtcd) -> None:
    async with following(EtcdRegistry(settings(etcd))) as directory, published(settings(etcd), entry("a")):
        await until(lambda: ids(directory) == ["a"])
        lease = etcd.ctl("lease", "list").split()[-1]
        etcd.ctl("lease", "revoke", lease)
        await until(lambda: not ids(directory))
        await until(lambda: ids(directory) == ["a"])


async def test_an_etcd_that_is_killed_keeps_the_list_and_comes_back(etcd: RunningEtcd) -> None:
    async with following(EtcdRegistry(settings(etcd))) as directory, published(settings(etcd), entry("a")):
        await until(lambda: ids(directory) == ["a"])
        etcd.end()
        await until(lambda: directory.stale_s(0.0) is not None)
        assert ids(directory) == ["a"]
        etcd.start()
        await until(lambda: directory.stale_s(0.0) is None)
        await until(lambda: ids(directory) == ["a"])


async def test_an_etcd_that_is_stopped_is_noticed(etcd: RunningEtcd) -> None:
    async with following(EtcdRegistry(settings(etcd))) as directory, published(settings(etcd), entry("a")) as mine:
        await until(lambda: ids(directory) == ["a"])
        etcd.signal(signal.SIGSTOP)
        try:
            await until(lambda: not mine.published.is_set())
            await until(lambda: directory.stale_s(0.0) is not None)
            assert ids(directory) == ["a"]
        finally:
            etcd.signal(signal.SIGCONT)
        await until(lambda: directory.stale_s(0.0) is None)
        await until(mine.published.is_set)


async def test_a_password_is_shown(etcd: RunningEtcd) -> None:
    await until(lambda: etcd.ctl("put", "x", "y"))
    etcd.ctl("user", "add", "root:secret")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("auth", "enable")
    known = settings(etcd, user="root", password="secret")
    async with following(EtcdRegistry(known)) as directory, published(known, entry("a")):
        await until(lambda: ids(directory) == ["a"])
    async with following(EtcdRegistry(settings(etcd))) as directory:
        await until(lambda: directory.stale_s(0.0) is not None)
        assert ids(directory) == []


async def test_a_listing_is_bounded_whatever_somebody_writes_below_the_prefix(etcd: RunningEtcd) -> None:
    for name in "abc":
        etcd.ctl("put", f"/kvgrpc/v1/engines/{name}/7", entry(name).to_json().decode())
    async with following(EtcdRegistry(settings(etcd, listed_max=2))) as directory:
        await until(lambda: ids(directory) == ["a", "b"])
    async with following(EtcdRegistry(settings(etcd))) as directory:
        await until(lambda: ids(directory) == ["a", "b", "c"])
