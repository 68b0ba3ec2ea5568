"""Open streams of peers, and their end."""

import asyncio

import pytest

from kvgrpc.errors import Reason, Unavailable
from kvgrpc.service.open_streams import OpenStreams


async def silence() -> str:
    await asyncio.Event().wait()
    return ""


def test_a_stream_that_waits_for_its_peer_returns_in_order_when_all_are_ended() -> None:
    async def scenario() -> None:
        standing = OpenStreams()

        async def stream() -> str:
            with standing.one():
                await standing.read(silence)
            return "in order"

        task = asyncio.create_task(stream())
        await asyncio.sleep(0)
        await standing.end()
        assert await task == "in order"
        with pytest.raises(Unavailable) as refused, standing.one():
            pass
        assert refused.value.reason is Reason.ENGINE_LOST

    asyncio.run(scenario())


def test_a_stream_that_sends_something_is_ended_only_when_that_has_gone_out() -> None:
    async def scenario() -> None:
        standing = OpenStreams()
        gone_out = asyncio.Event()
        sent = []

        async def stream() -> None:
            with standing.one():
                await gone_out.wait()
                sent.append("whole")
                await standing.read(silence)
                raise AssertionError("it reads on after the end")

        task = asyncio.create_task(stream())
        await asyncio.sleep(0)
        end = asyncio.create_task(standing.end())
        await asyncio.sleep(0)
        assert not task.done()
        gone_out.set()
        await end
        assert sent == ["whole"]
        await task

    asyncio.run(scenario())


def test_a_stream_cancelled_from_elsewhere_is_cancelled() -> None:
    async def scenario() -> None:
        standing = OpenStreams()

        async def stream() -> None:
            with standing.one():
                await standing.read(silence)

        task = asyncio.create_task(stream())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await standing.end()

    asyncio.run(scenario())
