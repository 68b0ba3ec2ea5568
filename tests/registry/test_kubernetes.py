"""A real kube-apiserver: engines behind Services come and go, and nothing that happens to the API server takes one out
of use.
"""

import asyncio
import signal
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from examples.certs import Authority
from kvgrpc.errors import InvalidRequest, Reason, Unavailable
from kvgrpc.fleet.directory import Directory
from kvgrpc.fleet.entry import EngineEntry, EngineRole
from kvgrpc.registry.introductions import IntroductionLimits
from kvgrpc.registry.kubernetes.api import (
    KubernetesApi,
    ObjectChanged,
    ObjectRemoved,
    ObjectsListed,
    ObjectStream,
    name_of,
)
from kvgrpc.registry.kubernetes.settings import KubernetesSettings, in_cluster
from kvgrpc.registry.kubernetes.slice_registry import SliceChoice, SliceRegistry
from tests.fleet.entries import entry
from tests.registry.apiservers import (
    SLICES,
    STRANGER,
    RunningApiServer,
    apiserver,
    endpoint,
    needs_apiserver,
    running_apiserver,
    slice_of,
)
from tests.registry.following import following, ids, until

__all__ = ["apiserver", "running_apiserver"]
QUICK = IntroductionLimits(ask_every_s=0.5, retry_s=0.05, timeout_s=1.0)
LEADS = {f"10.0.0.{n}:50051": entry(name, life=0, role=EngineRole.BOTH) for n, name in enumerate("abc", 1)}


async def introduce(address: str) -> EngineEntry:
    if address not in LEADS:
        raise Unavailable(Reason.PEER_UNREACHABLE, "nobody answers")
    return LEADS[address]


def registry(settings: KubernetesSettings) -> SliceRegistry:
    return SliceRegistry(settings, SliceChoice("app=kvgrpc"), introduce, QUICK)


def stale(directory: Directory) -> bool:
    return directory.stale_s(0.0) is not None


def put(server: RunningApiServer, *endpoints: dict[str, object], name: str = "s1", **head: object) -> None:
    """Makes a slice, or replaces it."""
    path = f"{SLICES}/{name}"
    try:
        known = server.call("GET", path)
    except OSError:
        server.call("POST", SLICES, slice_of(name, *endpoints, **head))
        return
    made = slice_of(name, *endpoints, **head)
    made["metadata"]["resourceVersion"] = known["metadata"]["resourceVersion"]
    server.call("PUT", path, made)


@needs_apiserver
async def test_engines_behind_a_service_are_found_and_their_readiness_is_followed(apiserver: RunningApiServer) -> None:
    a, b = endpoint("p-0", "10.0.0.1"), endpoint("p-1", "10.0.0.2")
    put(apiserver, a, b, annotations={"kvgrpc.dev/role": "prefill"})
    async with following(registry(apiserver.settings())) as directory:
        await until(lambda: ids(directory) == ["a", "b"])
        assert {one.entry.role for one in directory} == {EngineRole.PREFILL}
        assert not any(one.entry.draining for one in directory)
        put(apiserver, a, endpoint("p-1", "10.0.0.2", ready=False, terminating=True))
        await until(lambda: [one.entry.engine_id for one in directory if one.entry.draining] == ["b"])
        assert ids(directory) == ["a", "b"]
        put(apiserver, a, endpoint("p-1", "10.0.0.2", ready=False, serving=False, terminating=True))
        await until(lambda: ids(directory) == ["a"])
        put(apiserver, endpoint("p-2", "10.0.0.3"), name="s2", annotations={"kvgrpc.dev/role": "decode"})
        await until(lambda: ids(directory) == ["a", "c"])
        put(apiserver, a, annotations={"kvgrpc.dev/role": "decode"})  # looked at with every change
        await until(lambda: {one.entry.role for one in directory} == {EngineRole.DECODE})
        apiserver.call("DELETE", f"{SLICES}/s1")
        await until(lambda: ids(directory) == ["c"])
        assert not stale(directory)


@needs_apiserver
async def test_a_service_without_engines_is_an_empty_list_and_no_break(apiserver: RunningApiServer) -> None:
    async with following(registry(apiserver.settings())) as directory:
        await until(lambda: directory.complete)
        assert not ids(directory)
        assert not stale(directory)


@needs_apiserver
async def test_a_listing_comes_page_by_page(apiserver: RunningApiServer) -> None:
    for n in range(5):
        put(apiserver, name=f"s{n}")
    api = KubernetesApi(apiserver.settings(page_objects=2))
    async with aclosing(ObjectStream(api, SLICES, "app=kvgrpc").follow()) as news:
        first = await anext(news)
        assert isinstance(first, ObjectsListed)
        assert [name_of(one) for one in first.objects] == [f"s{n}" for n in range(5)]
    await api.close()


@needs_apiserver
async def test_a_watch_goes_on_where_the_last_one_ended(apiserver: RunningApiServer) -> None:
    api = KubernetesApi(apiserver.settings(watch_s=1.0))
    async with aclosing(ObjectStream(api, SLICES, "app=kvgrpc").follow()) as news:
        assert isinstance(await anext(news), ObjectsListed)
        for n in range(4):  # in more time than one watch has
            waiting = asyncio.ensure_future(anext(news))
            done, _ = await asyncio.wait({waiting}, timeout=0.7)
            assert not done
            await asyncio.to_thread(put, apiserver, name=f"s{n}")
            changed = await waiting
            assert isinstance(changed, ObjectChanged)
            assert name_of(changed.value) == f"s{n}"
        apiserver.call("DELETE", f"{SLICES}/s0")
        assert await anext(news) == ObjectRemoved("s0")
    await api.close()


@needs_apiserver
@pytest.mark.slow
async def test_a_version_that_has_gone_means_a_new_listing_and_no_break(apiserver: RunningApiServer) -> None:
    put(apiserver, name="goes")
    api = KubernetesApi(apiserver.settings())
    async with aclosing(ObjectStream(api, SLICES, "app=kvgrpc").follow()) as news:
        assert isinstance(await anext(news), ObjectsListed)
        # The watch begins after the listing. Meanwhile the API server starts again, and etcd forgets what was before.
        apiserver.call("DELETE", f"{SLICES}/goes")
        put(apiserver, name="comes")
        apiserver.end()
        apiserver.store.ctl("compact", str(apiserver.store.revision()))
        await asyncio.to_thread(apiserver.start)
        again = await anext(news)
        assert isinstance(again, ObjectsListed)
        assert [name_of(one) for one in again.objects] == ["comes"]
    await api.close()


@needs_apiserver
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_an_api_server_that_is_down_keeps_the_last_list(apiserver: RunningApiServer, fault: str) -> None:
    put(apiserver, endpoint("p-0", "10.0.0.1"))
    async with following(registry(apiserver.settings())) as directory:
        await until(lambda: ids(directory) == ["a"])
        if fault == "killed":
            apiserver.end()
        else:
            apiserver.signal(signal.SIGSTOP)
        await until(partial(stale, directory))
        assert ids(directory) == ["a"]
        if fault == "killed":
            await asyncio.to_thread(apiserver.start)
        else:
            apiserver.signal(signal.SIGCONT)
        await until(lambda: not stale(directory))
        await asyncio.to_thread(put, apiserver, endpoint("p-1", "10.0.0.2"))
        await until(lambda: ids(directory) == ["b"])


@needs_apiserver
async def test_a_token_is_read_again_and_one_without_the_right_is_told_why(
    apiserver: RunningApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(apiserver, endpoint("p-0", "10.0.0.1"))
    token = tmp_path / "token"
    token.write_text("expired")
    settings = replace(apiserver.settings(), token_file=token)
    async with following(registry(settings)) as directory:
        await until(lambda: "401" in caplog.text)
        token.write_text(STRANGER)
        await until(lambda: "403" in caplog.text)
        assert 'User "stranger" cannot list resource "endpointslices"' in caplog.text
        assert not directory.complete
        token.write_text("reader\n")
        await until(lambda: ids(directory) == ["a"])


@needs_apiserver
async def test_an_api_server_of_a_foreign_ca_is_not_read(apiserver: RunningApiServer, tmp_path: Path) -> None:
    put(apiserver, endpoint("p-0", "10.0.0.1"))
    right = apiserver.settings()
    ca = tmp_path / "ca.crt"
    ca.write_bytes(Authority().pem)
    async with following(registry(replace(right, ca_file=ca))) as directory:
        await until(partial(stale, directory))
        assert not directory.complete
        assert right.ca_file is not None
        ca.write_bytes(right.ca_file.read_bytes())  # a CA that is renewed is read again
        await until(lambda: ids(directory) == ["a"])


def test_a_pod_knows_its_api_server_by_its_service_account(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("llm\n")
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert in_cluster(environment, tmp_path) == KubernetesSettings(
        "https://10.96.0.1:6443", "llm", tmp_path / "token", tmp_path / "ca.crt"
    )
    assert in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path).url == "https://[fd00::1]:443"
    for wrong, folder in (({}, tmp_path), (environment, tmp_path / "none")):
        with pytest.raises(InvalidRequest):
            in_cluster(wrong, folder)
