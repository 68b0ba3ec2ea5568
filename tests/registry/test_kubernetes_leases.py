"""Leases of a real kube-apiserver: leads publish themselves, and their entries end when nobody renews them."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from kvgrpc.fleet.directory import Directory
from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.registry.addresses import publisher_at, registry_at
from kvgrpc.registry.kubernetes.lease_publication import LeaseHolder, LeasePublication
from kvgrpc.registry.kubernetes.lease_registry import ENTRY, LABEL, LeaseRegistry
from kvgrpc.registry.kubernetes.settings import KubernetesSettings
from tests.fleet.entries import entry
from tests.registry.apiservers import LEASES, PUBLISHER, RunningApiServer, apiserver, needs_apiserver, running_apiserver
from tests.registry.following import following, ids, until

__all__ = ["apiserver", "running_apiserver"]
pytestmark = needs_apiserver
HOLDER = LeaseHolder(lease_s=2)


@asynccontextmanager
async def published(
    to: KubernetesSettings, one: EngineEntry, holder: LeaseHolder = HOLDER
) -> AsyncIterator[LeasePublication]:
    publication = LeasePublication(to, one, holder)
    running = asyncio.create_task(publication.run())
    try:
        await until(publication.published.is_set)
        yield publication
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await publication.withdraw()


def names(server: RunningApiServer) -> list[str]:
    return [row["metadata"]["name"] for row in server.call("GET", LEASES)["items"]]


def stale(directory: Directory) -> bool:
    return directory.stale_s(0.0) is not None


async def test_what_is_published_is_found_changed_and_withdrawn(apiserver: RunningApiServer) -> None:
    async with following(LeaseRegistry(apiserver.settings())) as directory:
        async with published(apiserver.settings(), entry("a", incarnation=255)) as publication:
            await until(lambda: ids(directory) == ["a"])
            assert [name.rpartition("-")[2] for name in names(apiserver)] == ["ff"]
            publication.update(entry("a", incarnation=255, draining=True))
            await until(lambda: [one.entry.draining for one in directory] == [True])
        await until(lambda: not ids(directory))
        assert not names(apiserver)


async def test_a_pod_publishes_and_reads_by_an_address_alone(apiserver: RunningApiServer) -> None:
    address, pod = f"kubernetes-leases://?account={apiserver.account()}", apiserver.environment("p-0")
    async with following(registry_at(address, introduce, pod)) as directory:
        publication = publisher_at(address, pod, 2)(entry("a"))
        running = asyncio.create_task(publication.run())
        await until(lambda: ids(directory) == ["a"])
        (lease,) = apiserver.call("GET", LEASES)["items"]
        assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseDurationSeconds"]) == ("p-0", 2)
        assert lease["metadata"]["ownerReferences"][0]["uid"] == "uid-p-0"
        running.cancel()
        await asyncio.wait({running})
        await publication.withdraw()
        await until(lambda: not ids(directory))


async def introduce(address: str) -> EngineEntry:
    raise AssertionError(address)


async def test_an_entry_that_nobody_renews_ends_and_comes_back_with_a_renewal(apiserver: RunningApiServer) -> None:
    settings = apiserver.settings()
    async with following(LeaseRegistry(settings)) as directory, published(settings, entry("stays")):
        killed = LeasePublication(settings, entry("killed"), HOLDER)
        running = asyncio.create_task(killed.run())
        await until(lambda: ids(directory) == ["killed", "stays"])
        running.cancel()
        await until(lambda: ids(directory) == ["stays"])
        assert len(names(apiserver)) == 2  # the object stays, and nobody believes it
        running = asyncio.create_task(killed.run())
        await until(lambda: ids(directory) == ["killed", "stays"])
        running.cancel()
        await killed.withdraw()
        await until(lambda: ids(directory) == ["stays"])


async def test_the_dates_of_a_lease_are_compared_with_no_clock(apiserver: RunningApiServer) -> None:
    """A lead's clock may be years wrong, and may jump back at each renewal."""
    for n, year in enumerate((1999, 2099)):
        one = entry(f"e{n}")
        lease = {
            "metadata": {"name": f"e{n}", "labels": {LABEL: "x"}, "annotations": {ENTRY: one.to_json().decode()}},
            "spec": {"renewTime": f"{year}-01-01T00:00:00.000000Z", "leaseDurationSeconds": 2},
        }
        apiserver.call("POST", LEASES, lease)
    async with following(LeaseRegistry(apiserver.settings())) as directory:
        await until(lambda: ids(directory) == ["e0", "e1"])
        await until(lambda: not ids(directory))
        for year in (1998, 1997):
            renewed = {"spec": {"renewTime": f"{year}-01-01T00:00:00.000000Z"}}
            apiserver.call("PATCH", f"{LEASES}/e1", renewed)
            await until(lambda: ids(directory) == ["e1"])


async def test_a_lease_without_an_entry_is_refused_and_counted(apiserver: RunningApiServer) -> None:
    head = {"name": "junk", "labels": {LABEL: "x"}, "annotations": {ENTRY: "{"}}
    apiserver.call("POST", LEASES, {"metadata": head, "spec": {}})
    apiserver.call("POST", LEASES, {"metadata": {"name": "bare", "labels": {LABEL: "x"}}})
    long = {"name": "long", "labels": {LABEL: "x"}, "annotations": {ENTRY: " " * 100_000}}
    apiserver.call("POST", LEASES, {"metadata": long, "spec": {}})
    apiserver.call("POST", LEASES, {"metadata": {"name": "foreign"}, "spec": {"holderIdentity": "a controller"}})
    async with following(LeaseRegistry(apiserver.settings())) as directory:
        await until(lambda: directory.complete)
        assert not ids(directory)
        assert directory.refusals.unreadable == 3


async def test_a_lead_deletes_the_leases_of_its_earlier_lives_in_the_same_pod(apiserver: RunningApiServer) -> None:
    settings = apiserver.settings()
    for incarnation, pod in ((1, "p-0"), (2, "p-1")):
        left = LeasePublication(settings, entry("a", incarnation=incarnation), LeaseHolder(pod, "u"))
        running = asyncio.create_task(left.run())
        await until(left.published.is_set)
        running.cancel()
        await asyncio.wait({running})
        await left._api.close()
    async with published(settings, entry("a", incarnation=3), LeaseHolder("p-0", "u")):
        await until(lambda: [name[-2:] for name in names(apiserver)] == ["-2", "-3"])
        owner = apiserver.call("GET", f"{LEASES}/{names(apiserver)[0]}")["metadata"]["ownerReferences"]
        assert [(one["kind"], one["name"], one["uid"]) for one in owner] == [("Pod", "p-1", "u")]


async def test_a_lead_that_may_not_list_leases_is_published_all_the_same(
    apiserver: RunningApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    apiserver.allow(PUBLISHER, {"coordination.k8s.io/leases": ["create", "patch", "delete"]})
    async with published(apiserver.settings(PUBLISHER), entry("a"), LeaseHolder("p-0", "u", 2)) as mine:
        await until(lambda: "earlier lives" in caplog.text)
        assert mine.published.is_set()
        assert not mine.failure
    assert not names(apiserver)
    async with following(LeaseRegistry(apiserver.settings(PUBLISHER))) as directory:
        await until(partial(stale, directory))


async def test_the_number_of_leases_is_bounded(apiserver: RunningApiServer) -> None:
    few = apiserver.settings(objects_max=2)
    async with following(LeaseRegistry(few)) as directory:
        await until(lambda: directory.complete)
        for name in "abcd":
            head = {"name": name, "labels": {LABEL: "x"}, "annotations": {ENTRY: entry(name).to_json().decode()}}
            apiserver.call("POST", LEASES, {"metadata": head, "spec": {}})
        await until(lambda: ids(directory) == ["a", "b"])
        apiserver.call("DELETE", f"{LEASES}/a")
        await until(lambda: ids(directory) == ["b"])
    async with following(LeaseRegistry(few)) as directory:
        await until(lambda: ids(directory) == ["b", "c"])


async def test_two_engines_with_one_id_are_both_seen(apiserver: RunningApiServer) -> None:
    settings = apiserver.settings()
    first, second = entry("a", incarnation=1, life=1), entry("a", incarnation=2, life=2)
    async with following(LeaseRegistry(settings)) as directory, published(settings, first), published(settings, second):
        await until(lambda: len(directory) == 2)
        assert ids(directory) == ["a", "a"]


async def test_a_lease_that_somebody_deletes_is_made_anew(apiserver: RunningApiServer) -> None:
    settings = apiserver.settings()
    async with following(LeaseRegistry(settings)) as directory, published(settings, entry("a")):
        await until(lambda: ids(directory) == ["a"])
        apiserver.call("DELETE", LEASES)
        await until(lambda: not ids(directory))
        await until(lambda: ids(directory) == ["a"])


@pytest.mark.slow
async def test_no_lease_ends_while_the_api_server_is_down(apiserver: RunningApiServer) -> None:
    settings = apiserver.settings()
    async with following(LeaseRegistry(settings)) as directory, published(settings, entry("a")) as mine:
        await until(lambda: ids(directory) == ["a"])
        before = directory.find("a")
        apiserver.signal(signal.SIGSTOP)
        try:
            await until(lambda: not mine.published.is_set())
            await until(partial(stale, directory))
            # Longer than the Lease lasts.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLDER.lease_s + 1):
                    await mine.published.wait()
            assert ids(directory) == ["a"]
        finally:
            apiserver.signal(signal.SIGCONT)
        await until(mine.published.is_set)
        await until(lambda: not stale(directory))
        assert directory.find("a") is before
