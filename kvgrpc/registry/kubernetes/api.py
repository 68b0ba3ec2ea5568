"""The API of Kubernetes: objects are listed, then watched from the listing's version, then watched again from where the
last watch ended. A version that the API server no longer has means a new listing.

A watch is short, and the API server ends it: one that it does not end in time has lost its connection.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvgrpc.registry.base import down
from kvgrpc.registry.kubernetes.settings import KubernetesSettings

GONE = 410
"""Status of a version that the API server no longer has."""
MERGE = "application/merge-patch+json"
KubernetesObject = dict[str, Any]


@dataclass(frozen=True)
class ObjectsListed:
    """All objects there are."""

    objects: tuple[KubernetesObject, ...]


@dataclass(frozen=True)
class ObjectChanged:
    """One object is new, or has changed."""

    value: KubernetesObject


@dataclass(frozen=True)
class ObjectRemoved:
    """One object has gone."""

    name: str


ObjectNews = ObjectsListed | ObjectChanged | ObjectRemoved


class VersionGoneError(Exception):
    """The API server no longer has the changes since a version."""


class KubernetesApi:
    """Calls to the API server, over connections of its own."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self.settings = settings
        self._session: aiohttp.ClientSession | None = None

    def path(self, group: str, resource: str) -> str:
        """Returns the path of a namespace's objects."""
        return f"/apis/{group}/namespaces/{self.settings.namespace}/{resource}"

    async def call(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: object = None, form: str = MERGE
    ) -> tuple[int, KubernetesObject]:
        """Returns the status, and the object that came with it. Raises RegistryDown for what is neither a success nor
        a status of the object itself: it is not there, it is there already, or its version has gone.
        """
        data = None if body is None else json.dumps(body).encode()
        times = aiohttp.ClientTimeout(total=self.settings.timeout_s)
        async with self._request(method, path, query, times, data, form) as reply:
            found = _object(await self._all_of(reply))
            if reply.status >= 400 and reply.status not in {404, 409, GONE}:
                raise down(f"{reply.status} {found.get('message', '')}")
            return reply.status, found

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, query: Mapping[str, str] | None, times: aiohttp.ClientTimeout,
        data: bytes | None = None, form: str = "",
    ) -> AsyncIterator[aiohttp.ClientResponse]:  # fmt: skip
        try:
            if self._session is None:
                self._session = self._connect()
            headers = {"Accept": "application/json", **({"Content-Type": form} if data is not None else {})}
            if self.settings.token_file is not None:
                token = await asyncio.to_thread(self.settings.token_file.read_text)
                headers["Authorization"] = f"Bearer {token.strip()}"
            url = self.settings.url + path
            async with self._session.request(
                method, url, params=query, data=data, headers=headers, timeout=times, allow_redirects=False
            ) as reply:
                try:
                    yield reply
                except BaseException:
                    # A watch is given up: an API server that is stopped would never answer the goodbye of TLS.
                    if reply.connection is not None and reply.connection.transport is not None:
                        reply.connection.transport.abort()
                    raise
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            await self.close()
            raise down(f"{type(error).__name__} {error}") from error

    def _connect(self) -> aiohttp.ClientSession:
        """Returns connections that trust what the CA's file has now: the file may be renewed, too."""
        trusted = ssl.create_default_context(cafile=self.settings.ca_file)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def lines(self, path: str, query: Mapping[str, str], timeout_s: float) -> AsyncGenerator[bytes, None]:
        """Yields the lines of a reply, until it ends or the time is over."""
        times = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.settings.timeout_s)
        async with self._request("GET", path, query, times) as reply:
            if reply.status != 200:
                found = _object(await self._all_of(reply))
                if reply.status == GONE:
                    raise VersionGoneError(found.get("message", ""))
                raise down(f"{reply.status} {found.get('message', '')}")
            rest = bytearray()
            async for chunk in reply.content.iter_any():
                rest += chunk
                if len(rest) > self.settings.body_bytes_max:
                    raise down(f"an event has more than {self.settings.body_bytes_max} bytes")
                *whole, tail = rest.split(b"\n")
                rest = bytearray(tail)
                for line in whole:
                    yield bytes(line)

    async def _all_of(self, reply: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for chunk in reply.content.iter_any():
            data += chunk
            if len(data) > self.settings.body_bytes_max:
                raise down(f"a reply has more than {self.settings.body_bytes_max} bytes")
        return bytes(data)


class ObjectStream:
    """The objects at a path, as they are and as they change."""

    def __init__(self, api: KubernetesApi, path: str, selector: str) -> None:
        self._api = api
        self._path = path
        self._selector = selector
        self.version = ""
        """Version of the objects that has been told."""

    async def follow(self) -> AsyncGenerator[ObjectNews, None]:
        """Tells a listing, then changes, and a listing again where changes are lost. Raises RegistryDown."""
        gone = 0
        while True:
            try:
                if not self.version:
                    yield await self._list()
                async with aclosing(self._watch()) as changes:
                    async for one in changes:
                        gone = 0
                        yield one
            except VersionGoneError as error:
                gone += 1
                if gone > 1:  # also what was listed anew: not again without a pause
                    raise down(f"{error}") from error
                self.version = ""

    async def _list(self) -> ObjectsListed:
        settings = self._api.settings
        found, token = list[KubernetesObject](), ""
        while True:
            limit = min(settings.page_objects, settings.objects_max - len(found))
            query = {"limit": str(limit), "labelSelector": self._selector, **({"continue": token} if token else {})}
            status, page = await self._api.call("GET", self._path, query)
            if status == GONE and token:  # changes since the first page are compacted: begin again
                found, token = [], ""
                continue
            if status != 200:
                raise down(f"{status} {page.get('message', '')}")
            items, head = page.get("items") or [], page.get("metadata") or {}
            found += [one for one in items if isinstance(one, dict)]
            token = head.get("continue") or ""
            if not token or len(found) >= settings.objects_max:
                self.version = str(head.get("resourceVersion", ""))
                return ObjectsListed(tuple(found))

    async def _watch(self) -> AsyncGenerator[ObjectNews, None]:
        watch_s = self._api.settings.watch_s
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(max(1, round(watch_s)))}
        query |= {"labelSelector": self._selector, "resourceVersion": self.version}
        async with aclosing(self._api.lines(self._path, query, watch_s + self._api.settings.timeout_s)) as lines:
            async for line in lines:
                kind, value = _event(line)
                self.version = str((value.get("metadata") or {}).get("resourceVersion", self.version))
                if kind in {"ADDED", "MODIFIED"}:
                    yield ObjectChanged(value)
                elif kind == "DELETED":
                    yield ObjectRemoved(name_of(value))


def name_of(found: KubernetesObject) -> str:
    return str((found.get("metadata") or {}).get("name", ""))


def _event(line: bytes) -> tuple[str, KubernetesObject]:
    """Returns the type and the object of an event. Raises RegistryDown and VersionGoneError for one that ends the
    watch.
    """
    try:
        event = _object(line)
    except ValueError as error:
        raise down(f"{type(error).__name__} {error}") from error
    kind, value = str(event.get("type")), event.get("object")
    if not isinstance(value, dict):
        raise down("an event has no object")
    if kind == "ERROR" and value.get("code") == GONE:
        raise VersionGoneError(value.get("message", ""))
    if kind == "ERROR":
        raise down(f"the watch was ended: {value.get('message', '')}")
    return kind, value


def _object(text: bytes) -> KubernetesObject:
    found = json.loads(text) if text else {}
    return found if isinstance(found, dict) else {}
