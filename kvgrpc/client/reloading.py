"""A channel under TLS that takes changed files for new connections. gRPC for Python cannot change those of a channel.

Rules:
* Changed files that fit together begin another channel. It takes over as soon as it is connected, or at once where the
  current one is not. So files that the server does not trust yet cost a connected client nothing.
* Calls of the former channel have DRAIN_S to end. Watches and renewals then continue over the current one.
* Files that do not fit together change nothing, because who writes them may be half way.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from grpc import aio

from kvgrpc.client.channel import open_channel
from kvgrpc.client.credentials import TlsPaths
from kvgrpc.errors import InvalidRequest

FILES_LOOK_S = 1.0
"""Time between two looks at the files of TLS, in seconds."""
DRAIN_S = 600.0
"""Maximum time that calls of a former channel go on, in seconds."""


class ReloadingChannel(aio.Channel):
    """The channels to one server, of which new calls take the current one. Used in one event loop."""

    def __init__(self, address: str, paths: TlsPaths, options: Sequence[tuple[str, str | int]]) -> None:
        """Raises InvalidRequest for files that are not usable."""
        self._address, self._paths, self._options = address, paths, options
        self._digest = paths.digest()
        self._look_at = time.monotonic() + FILES_LOOK_S
        self._current = self._open()
        self._next: aio.Channel | None = None
        self._former: dict[aio.Channel, asyncio.TimerHandle] = {}
        """Channels that still have calls, perhaps, with the end of their time."""
        self._ending: set[asyncio.Task[None]] = set()

    def now(self) -> aio.Channel:
        """Returns the channel of a call that is made now."""
        if time.monotonic() >= self._look_at:
            self._look()
        if self._next is not None and self._may_go_over(self._next):
            self._retire(self._current)
            self._current, self._next = self._next, None
        return self._current

    def _may_go_over(self, to: aio.Channel) -> bool:
        ready = grpc.ChannelConnectivity.READY
        return to.get_state(try_to_connect=True) is ready or self._current.get_state() is not ready

    def _look(self) -> None:
        self._look_at = time.monotonic() + FILES_LOOK_S
        with contextlib.suppress(InvalidRequest):
            digest = self._paths.digest()
            if digest != self._digest:
                found, self._digest = self._open(), digest
                if self._next is not None:
                    self._retire(self._next)
                self._next = found

    def _open(self) -> aio.Channel:
        return open_channel(self._address, self._paths.channel_credentials(), self._options)

    def _retire(self, former: aio.Channel) -> None:
        # A close with a grace time cannot be cut short by another one, so it is not used.
        self._former[former] = asyncio.get_running_loop().call_later(DRAIN_S, self._end, former)

    def _end(self, former: aio.Channel) -> None:
        del self._former[former]
        ending = asyncio.create_task(former.close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    # ---- what gRPC's channels have

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for timer in self._former.values():
            timer.cancel()
        channels = [self._current, *self._former, *(() if self._next is None else (self._next,))]
        await asyncio.gather(*(channel.close(grace) for channel in channels))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.now().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.now().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the channel that is the current one now is connected."""
        await self.now().channel_ready()

    def unary_unary(self, *given: Any, **options: Any) -> Any:
        """Returns a method whose calls take the channel of their moment."""
        return _LateMethod(self, "unary_unary", given, options)

    def unary_stream(self, *given: Any, **options: Any) -> Any:
        """Returns a method whose calls take the channel of their moment."""
        return _LateMethod(self, "unary_stream", given, options)

    def stream_unary(self, *given: Any, **options: Any) -> Any:
        """Returns a method whose calls take the channel of their moment."""
        return _LateMethod(self, "stream_unary", given, options)

    def stream_stream(self, *given: Any, **options: Any) -> Any:
        """Returns a method whose calls take the channel of their moment."""
        return _LateMethod(self, "stream_stream", given, options)


class _LateMethod:
    """One method of a service, on the channel of the last call until there is another."""

    def __init__(self, channels: ReloadingChannel, kind: str, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._channels, self._kind, self._given, self._options = channels, kind, given, options
        self._channel: aio.Channel | None = None
        self._method: Any = None

    def __call__(self, *given: Any, **options: Any) -> Any:
        channel = self._channels.now()
        if channel is not self._channel:
            self._channel = channel
            self._method = getattr(channel, self._kind)(*self._given, **self._options)
        return self._method(*given, **options)
