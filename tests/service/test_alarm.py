"""An alarm is one timer, which rings at the earliest deadline."""

import asyncio

from kvgrpc.service.runner import Alarm


async def test_it_rings_once_for_all_deadlines_at_the_earliest() -> None:
    loop, rings = asyncio.get_running_loop(), asyncio.Queue[float]()
    alarm = Alarm(lambda: rings.put_nowait(loop.time()))
    now = loop.time()
    for delay_s in (3600.0, 0.02, 1800.0, 0.04):
        alarm.set(now + delay_s)
    assert await rings.get() >= now + 0.02
    alarm.set(None)
    later = asyncio.Event()
    loop.call_at(now + 0.06, later.set)
    await later.wait()
    assert rings.empty(), "who hears it sets it again"
    alarm.set(now)
    assert await rings.get() >= now + 0.06


async def test_what_was_cleared_does_not_ring_until_it_is_set_again() -> None:
    loop, rings = asyncio.get_running_loop(), asyncio.Queue[str]()
    alarm = Alarm(lambda: rings.put_nowait("rang"))
    alarm.clear()
    alarm.set(loop.time())
    alarm.clear()
    later = asyncio.Event()
    loop.call_later(0.02, later.set)
    await later.wait()
    assert rings.empty()
    alarm.set(loop.time())
    assert await rings.get() == "rang"
