"""etcd: a key for each life of an engine, under a lease that its lead renews.

Every call has a deadline of its own, and a watch that is silent asks for a sign of life: a member that is stopped keeps
its TCP connections, and only an answer that does not come shows it. After any failure the next member is tried.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvgrpc.errors import KVGrpcError
from kvgrpc.etcd.v1 import etcd_pb2
from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.registry.base import EntryChanged, EntryRemoved, RegistryListing, RegistryNews, down

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)
PREFIX = "/kvgrpc/v1/engines/"
"""First part of all keys."""
PAGE_KEYS = 500
"""Maximum number of keys in one reply."""
LISTED_MAX = 16_384
"""Maximum number of keys of a listing. A directory takes fewer; the rest is not even read."""
PROBE_S = 5.0
"""Time of silence of a watch after which etcd is asked for a sign of life, in seconds."""
KEEP_ALIVE = "Lease/LeaseKeepAlive"
"""Name of the one call that etcd has as a stream."""
_OPTIONS = [
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True)
class EtcdSettings:
    """Addresses and credentials of etcd."""

    endpoints: tuple[str, ...]
    credentials: grpc.ChannelCredentials | None = None
    """TLS; None: plain text."""
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: float = 3.0
    """Deadline of each call, in seconds."""
    ttl_s: int = 15
    """Time after which an entry goes when its lead renews it no longer, in seconds."""
    probe_s: float = PROBE_S
    listed_max: int = LISTED_MAX
    prefix: str = PREFIX


class EtcdConnection:
    """A channel to one member at a time."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self._member = 0
        self._channel: grpc.aio.Channel | None = None
        self._token = ""

    async def call(self, method: str, request: Message, reply: type[_Reply], timeout_s: float | None = None) -> _Reply:
        """Returns the reply. Raises RegistryDown."""
        try:
            async with asyncio.timeout(timeout_s or self.settings.timeout_s):
                return await self._call(method, request, reply)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            await self.leave()
            raise down(_said(error)) from error

    async def _call(self, method: str, request: Message, reply: type[_Reply]) -> _Reply:
        channel, metadata = await self.open()
        name = f"/etcdserverpb.{method}"
        if method != KEEP_ALIVE:
            return await channel.unary_unary(name, type(request).SerializeToString, reply.FromString)(
                request, metadata=metadata
            )
        stream = channel.stream_stream(name, type(request).SerializeToString, reply.FromString)(metadata=metadata)
        try:
            await stream.write(request)
            answer = await stream.read()
        finally:
            stream.cancel()
        if not isinstance(answer, reply):
            raise TimeoutError
        return answer

    async def open(self) -> tuple[grpc.aio.Channel, list[tuple[str, str]]]:
        """Returns the channel, with what calls carry. Raises AioRpcError for a password that is refused."""
        if self._channel is None:
            address, credentials = self.settings.endpoints[self._member], self.settings.credentials
            self._channel = (
                grpc.aio.insecure_channel(address, _OPTIONS)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials, _OPTIONS)
            )
        if self.settings.user and not self._token:
            ask = self._channel.unary_unary(
                "/etcdserverpb.Auth/Authenticate",
                etcd_pb2.AuthenticateRequest.SerializeToString,
                etcd_pb2.AuthenticateResponse.FromString,
            )
            login = etcd_pb2.AuthenticateRequest(name=self.settings.user, proof=self.settings.password.encode())
            self._token = (await ask(login, timeout=self.settings.timeout_s)).token.decode()
        return self._channel, [("token", self._token)] if self._token else []

    async def leave(self) -> None:
        """Closes the channel: the next call goes to the next member."""
        channel, self._channel, self._token = self._channel, None, ""
        self._member = (self._member + 1) % len(self.settings.endpoints)
        if channel is not None:
            await channel.close()


class EtcdRegistry:
    """The entries that etcd has."""

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._etcd = EtcdConnection(settings)
        self._heard_at = 0.0
        """Time of the last sign of life during a watch."""

    async def watch(self) -> AsyncIterator[RegistryNews]:
        listing, revision = await self._list()
        yield listing
        channel, metadata = await self._opened()
        key = self._settings.prefix.encode()
        begin = etcd_pb2.WatchCreateRequest(
            range_start=key, range_end=_end(key), start_revision=revision + 1, progress_notify=True
        )
        stream = channel.stream_stream(
            "/etcdserverpb.Watch/Watch", etcd_pb2.WatchRequest.SerializeToString, etcd_pb2.WatchResponse.FromString
        )(metadata=metadata)
        self._heard_at = _now()
        probing = asyncio.create_task(self._probe())
        # A channel that closes ends no reads that began in another task, in some versions of gRPC.
        probing.add_done_callback(lambda _: stream.cancel())
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await stream.write(etcd_pb2.WatchRequest(create_request=begin))
                told = await stream.read()
            while isinstance(told, etcd_pb2.WatchResponse):
                if told.canceled:
                    raise down(_ended(told))
                for event in told.events:
                    yield _news(event)
                told = await stream.read()
                self._heard_at = _now()
            raise down("the watch broke off")
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            await self._etcd.leave()
            raise down(_said(error)) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            # The probe ends the stream as it raises. If another one has closed it, the watch is cancelled.
            for ended in (await asyncio.wait({probing}, timeout=self._settings.timeout_s))[0]:
                await ended
            raise
        finally:
            stream.cancel()
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def close(self) -> None:
        await self._etcd.leave()

    async def _probe(self) -> None:
        """Asks etcd for a sign of life when the watch is silent. Without one, ends the connection with the watch and
        raises RegistryDown.
        """
        while True:
            silent_s = _now() - self._heard_at
            if silent_s < self._settings.probe_s:
                await asyncio.sleep(self._settings.probe_s - silent_s)
                continue
            # A read that a majority has to agree to: a member that is cut off from the others does not answer it.
            asked = etcd_pb2.RangeRequest(range_start=self._settings.prefix.encode(), limit=1)
            await self._etcd.call("KV/Range", asked, etcd_pb2.RangeResponse)
            self._heard_at = _now()

    async def _opened(self) -> tuple[grpc.aio.Channel, list[tuple[str, str]]]:
        try:
            return await self._etcd.open()
        except grpc.aio.AioRpcError as error:
            raise down(_said(error)) from error

    async def _list(self) -> tuple[RegistryListing, int]:
        """Returns all entries, with the revision from before the first page: changes in between come once more."""
        key = self._settings.prefix.encode()
        end, found, revision, more = _end(key), list[tuple[str, bytes, int]](), 0, True
        while more:
            limit = min(PAGE_KEYS, self._settings.listed_max - len(found))
            asked = etcd_pb2.RangeRequest(range_start=key, range_end=end, limit=limit)
            page = await self._etcd.call("KV/Range", asked, etcd_pb2.RangeResponse)
            revision = revision or page.header.revision
            found += [(kv.name.decode(errors="replace"), kv.value, kv.mod_revision) for kv in page.kvs]
            more = page.more and bool(page.kvs) and len(found) < self._settings.listed_max
            key = page.kvs[-1].name + b"\0" if more else key
        return RegistryListing(tuple(found)), revision


class EtcdPublication:
    """One entry of this process, which stays in etcd as long as `run` does."""

    def __init__(self, settings: EtcdSettings, entry: EngineEntry) -> None:
        self._settings = settings
        self._etcd = EtcdConnection(settings)
        self._entry = entry
        self._lease = 0
        self._changed = asyncio.Event()
        self.published = asyncio.Event()
        """Set while etcd has the entry."""
        self.failure = ""
        """Reason why etcd lacks the entry; empty: it has it, or nothing was tried yet."""

    def update(self, entry: EngineEntry) -> None:
        """Publishes another value of the same life, soon."""
        self._entry = entry
        self._changed.set()

    async def run(self) -> None:
        """Publishes the entry and renews its lease. A lease that is lost is asked for anew. It never ends by itself."""
        third = self._settings.ttl_s / 3
        while True:
            try:
                await self._renew(min(third, self._settings.timeout_s))
                self.failure, wait_s = "", third
            except KVGrpcError as error:
                self.published.clear()
                if not self.failure:  # once for each outage
                    _log.warning("this engine is not renewed in etcd: %s", error)
                self.failure = str(error)
                wait_s = min(1.0, third)
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def withdraw(self) -> None:
        """Removes the entry. Without an answer the lease ends it."""
        try:
            if self._lease:
                asked = etcd_pb2.LeaseRevokeRequest(id=self._lease)
                await self._etcd.call("Lease/LeaseRevoke", asked, etcd_pb2.LeaseRevokeResponse)
        except KVGrpcError as error:
            _log.info("the entry in etcd ends with its lease: %s", error)
        finally:
            self._lease = 0
            self.published.clear()
            await self._etcd.leave()

    async def _renew(self, timeout_s: float) -> None:
        if self._lease:
            asked = etcd_pb2.LeaseKeepAliveRequest(id=self._lease)
            left = await self._etcd.call(KEEP_ALIVE, asked, etcd_pb2.LeaseKeepAliveResponse, timeout_s)
            if not left.ttl:
                self._lease = 0
        if not self._lease:
            wanted = etcd_pb2.LeaseGrantRequest(ttl=self._settings.ttl_s)
            self._lease = (await self._etcd.call("Lease/LeaseGrant", wanted, etcd_pb2.LeaseGrantResponse)).id
            self.published.clear()
        if not self.published.is_set() or self._changed.is_set():
            self._changed.clear()
            try:
                await self._etcd.call("KV/Put", self._put(), etcd_pb2.PutResponse)
            except KVGrpcError:
                self._lease = 0  # it may be the lease that is not there any more
                raise
            self.published.set()

    def _put(self) -> etcd_pb2.PutRequest:
        key = f"{self._settings.prefix}{self._entry.engine_id}/{self._entry.incarnation}"
        return etcd_pb2.PutRequest(name=key.encode(), value=self._entry.to_json(), lease=self._lease)


def _news(event: etcd_pb2.Event) -> RegistryNews:
    key = event.kv.name.decode(errors="replace")
    if event.type == etcd_pb2.Event.EVENT_TYPE_DELETE:
        return EntryRemoved(key, event.kv.mod_revision)
    return EntryChanged(key, event.kv.value, event.kv.mod_revision)


def _ended(told: etcd_pb2.WatchResponse) -> str:
    if told.compact_revision:  # etcd gives no reason of its own
        return f"changes before revision {told.compact_revision} are compacted"
    return told.cancel_reason or "the watch was ended"


def _end(prefix: bytes) -> bytes:
    """Returns the end of the range of all keys that begin with a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _now() -> float:
    return asyncio.get_running_loop().time()


def _said(error: Exception) -> str:
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else "no answer in time"
