"""What an API server may say to a watch, said by a server that the test writes: the cases that a real one shows only
after minutes, or never.
"""

import asyncio
import gc
import json
import socket
import ssl
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from examples.certs import Authority, usual_names
from kvgrpc.registry.base import RegistryDown
from kvgrpc.registry.kubernetes.api import (
    KubernetesApi,
    ObjectChanged,
    ObjectNews,
    ObjectsListed,
    ObjectStream,
    name_of,
)
from kvgrpc.registry.kubernetes.settings import KubernetesSettings
from tests.registry.etcds import free_port

PATH = "/apis/x/namespaces/llm/things"


class ScriptedServer:
    """Answers each request with the next one of its answers: a status, and lines."""

    def __init__(self, *answers: tuple[int, list[bytes]]) -> None:
        self._answers = list(answers)
        self.asked: list[dict[str, str]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(dict(request.query))
        status, lines = self._answers.pop(0) if self._answers else (500, [b"{}"])
        return web.Response(status=status, body=b"\n".join([*lines, b""]) if lines else b"")


def listing(*names: str, version: int, more: str = "") -> tuple[int, list[bytes]]:
    head = {"resourceVersion": str(version), "continue": more}
    return 200, [json.dumps({"metadata": head, "items": [thing(name) for name in names]}).encode()]


def watch(*events: tuple[str, dict[str, Any]]) -> tuple[int, list[bytes]]:
    return 200, [json.dumps({"type": kind, "object": value}).encode() for kind, value in events]


def thing(name: str, version: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


GONE = {"kind": "Status", "code": 410, "message": "too old"}
REFUSED = (410, [json.dumps(GONE).encode()])


async def told(server: ScriptedServer, **changes: Any) -> tuple[list[str], str]:
    """Returns what a reader hears, and how it ends."""
    heard = list[str]()
    async with running(server, **changes) as stream, aclosing(stream.follow()) as news:
        try:
            async for one in news:
                heard.append(words(one))
        except RegistryDown as error:
            return heard, str(error)
    raise AssertionError("a stream does not end by itself")


def words(news: ObjectNews) -> str:
    match news:
        case ObjectsListed():
            return "all: " + " ".join(name_of(one) for one in news.objects)
        case ObjectChanged():
            return f"+{name_of(news.value)}"
        case _:
            return f"-{news.name}"


@asynccontextmanager
async def running(server: ScriptedServer, **changes: Any) -> AsyncIterator[ObjectStream]:
    port = free_port()
    application = web.Application()
    application.router.add_get(PATH, server.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    api = KubernetesApi(KubernetesSettings(f"http://127.0.0.1:{port}", "llm", **changes))
    try:
        yield ObjectStream(api, PATH, "app=x")
    finally:
        await api.close()
        await runner.cleanup()


async def test_the_next_watch_begins_after_the_last_event_or_bookmark() -> None:
    server = ScriptedServer(
        listing("a", version=5),
        watch(("ADDED", thing("b", 7)), ("BOOKMARK", thing("", 9))),
        watch(("DELETED", thing("a", 11))),
        watch(),
    )
    heard, _ = await told(server)
    assert heard == ["all: a", "+b", "-a"]
    assert [one.get("resourceVersion") for one in server.asked] == [None, "5", "9", "11", "11"]
    assert all(one["allowWatchBookmarks"] == "true" for one in server.asked[1:])


async def test_a_version_that_has_gone_means_a_new_listing_however_it_is_told() -> None:
    for gone in (REFUSED, watch(("ERROR", GONE))):
        server = ScriptedServer(listing("a", version=5), gone, listing("b", version=8), watch(("ADDED", thing("c", 9))))
        heard, _ = await told(server)
        assert heard == ["all: a", "all: b", "+c"]


async def test_a_version_that_goes_again_and_again_is_a_break() -> None:
    server = ScriptedServer(listing("a", version=5), REFUSED, listing("a", version=6), REFUSED)
    heard, why = await told(server)
    assert heard == ["all: a", "all: a"]
    assert "too old" in why


async def test_pages_whose_version_goes_are_listed_from_the_beginning() -> None:
    server = ScriptedServer(
        listing("a", version=5, more="t1"), REFUSED, listing("a", version=8, more="t2"), listing("b", version=8)
    )
    heard, _ = await told(server)
    assert heard == ["all: a b"]
    assert [one.get("continue") for one in server.asked[:4]] == [None, "t1", None, "t2"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((503, [b'{"message": "etcd is away"}']), "503 etcd is away"),
        ((404, [b'{"message": "no such kind"}']), "404 no such kind"),
        ((302, [b"{}"]), "302"),
        ((502, [b"<html>a proxy</html>"]), "JSONDecodeError"),
        (watch(("ERROR", {"code": 500, "message": "overloaded"})), "overloaded"),
        ((200, [b'{"type": "ADDED"}']), "an event has no object"),
        ((200, [b"no JSON"]), "JSONDecodeError"),
    ],
)
async def test_anything_else_is_a_break_that_says_why(answer: tuple[int, list[bytes]], why: str) -> None:
    heard, said = await told(ScriptedServer(listing("a", version=5), answer))
    assert heard == ["all: a"]
    assert why in said


async def test_a_reply_that_is_too_large_is_a_break() -> None:
    large = thing("x" * 2_000)
    _, why = await told(ScriptedServer((200, [json.dumps({"items": [large]}).encode()])), body_bytes_max=1_000)
    assert "more than 1000 bytes" in why
    _, why = await told(ScriptedServer(listing("a", version=5), watch(("ADDED", large))), body_bytes_max=1_000)
    assert "more than 1000 bytes" in why


async def test_the_number_of_objects_of_a_listing_is_bounded() -> None:
    heard, _ = await told(ScriptedServer(listing("a", "b", version=5, more="t"), watch()), objects_max=2)
    assert heard == ["all: a b"]


def test_a_watch_that_is_given_up_leaves_no_connection_to_a_server_that_stands_still(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, usual_names("server"))
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trusted.load_cert_chain(files.cert, files.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serving = threading.Thread(target=serve_one_line, args=(listener, trusted, held := list[ssl.SSLSocket]()))
        serving.start()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            asyncio.run(begin_and_give_up(KubernetesSettings(f"https://127.0.0.1:{port}", "llm", ca_file=files.ca)))
            gc.collect()
        serving.join()
    for one in held:
        one.close()
    assert not warned


def serve_one_line(listener: socket.socket, trusted: ssl.SSLContext, held: list[ssl.SSLSocket]) -> None:
    """Begins a reply, and then neither says nor hears anything."""
    one = trusted.wrap_socket(listener.accept()[0], server_side=True)
    held.append(one)
    one.recv(4_096)
    one.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}\n\r\n")


async def begin_and_give_up(settings: KubernetesSettings) -> None:
    api, heard = KubernetesApi(settings), asyncio.Event()

    async def read() -> None:
        async with aclosing(api.lines(PATH, {}, 30.0)) as lines:
            async for _ in lines:
                heard.set()

    reading = asyncio.create_task(read())
    await heard.wait()
    reading.cancel()
    await asyncio.wait({reading})
    await api.close()
