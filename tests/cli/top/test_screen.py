"""The screen of `kvgrpc top` against real leads, without a terminal."""

import asyncio

import pytest
from textual.strip import Strip

from kvgrpc.client import Client, connect
from kvgrpc.v1.handshake_pb2 import ADMISSION_DRAINING, ADMISSION_OPEN
from tests.cli.top.screens import has, screen, shows
from tests.client.serving import served

TOKENS = list(range(32))


async def test_views_show_what_several_leads_have_and_a_lease_is_released_after_a_question() -> None:
    with served("--engine-id", "P", "--drain-s", "0") as p, served("--engine-id", "D", "--drain-s", "0") as d:
        async with connect(p.address) as client, screen(p.address, d.address) as (app, pilot):
            await shows(app, pilot, has(f"P       open   {p.address}", f"D       open   {d.address}"))
            taken = await client.allocate(2)
            handed = await client.finished_blocks(taken, TOKENS, request_id="chat-7", ttl_s=600)
            await pilot.press("2")
            lines = await shows(app, pilot, has("L.......", "MAP"))
            assert any("62" in line for line in lines)
            await pilot.press("4")
            await shows(app, pilot, has(handed.transfer.transfer_id, "TRANSFER"))
            await pilot.press("3")
            await shows(app, pilot, has(handed.lease.lease_id, "chat-7"))
            await pilot.press("x", "n")
            assert (await client.get_lease(handed.lease.lease_id)).lease.state
            await pilot.press("x", "y")
            await shows(app, pilot, has(f"{handed.lease.lease_id} is released", "0 of 0 rows"))
            await pilot.press("d")
            await shows(app, pilot, has("choose one of the engines first (key 1)"))


async def test_a_transfer_is_cancelled_and_rows_are_filtered() -> None:
    with served("--engine-id", "P", "--drain-s", "0") as p:
        async with connect(p.address) as client, screen(p.address) as (app, pilot):
            names = [await _handed(client, f"chat-{number}") for number in range(2)]
            await pilot.press("4")
            await shows(app, pilot, has(*names))
            await pilot.press("slash", *"chat-1", "enter")
            await shows(app, pilot, has("1 of 2 rows"))
            await pilot.press("c", "y")
            await shows(app, pilot, has(f"{names[1]} is cancelled", "cancelled"))
            await pilot.press("escape")
            await shows(app, pilot, has("2 of 2 rows"))


async def _handed(client: Client, request_id: str) -> str:
    reply = await client.finished_blocks(await client.allocate(2), TOKENS, request_id=request_id, ttl_s=600)
    return reply.transfer.transfer_id


async def test_an_engine_is_drained_and_takes_work_again() -> None:
    with served("--engine-id", "P", "--drain-s", "0") as p:
        async with connect(p.address) as client, screen(p.address) as (app, pilot):
            await shows(app, pilot, has("open"))
            await pilot.press("d", "y")
            await shows(app, pilot, has(f"{p.address} drains", "draining"))
            assert (await client.status()).admission == ADMISSION_DRAINING
            await pilot.press("u", "y")
            await shows(app, pilot, has(f"{p.address} takes work again", "open"))
            assert (await client.status()).admission == ADMISSION_OPEN


async def test_a_lead_that_is_away_is_shown_so_and_comes_back() -> None:
    with served("--engine-id", "P", "--drain-s", "0") as p:
        port = p.port
        async with screen(p.address) as (app, pilot):
            await shows(app, pilot, has("open"))
            p.process.terminate()
            await asyncio.to_thread(p.process.wait)
            await shows(app, pilot, has(f"away: 127.0.0.1:{port}"))
            with served("--engine-id", "P", "--drain-s", "0", port=port):
                await shows(app, pilot, has("open"))
                await shows(app, pilot, lambda lines: not has("away")(lines))


@pytest.mark.parametrize("width", [30, 80])
async def test_a_narrow_terminal_has_whole_ids_and_says_what_is_left_out(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with served("--engine-id", "prefill-with-a-name", "--drain-s", "0") as p:
        async with screen(p.address, size=(width, 8)) as (app, pilot):
            lines = await shows(app, pilot, has("> prefill-with-a-name"))
            assert len(lines) == 8
            assert all(len(line) <= width for line in lines)
            assert lines[-1].startswith("q quit"), "how to leave is seen at any width"
            assert app.no_color


async def test_lines_that_did_not_change_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with served("--engine-id", "P", "--drain-s", "0") as p:
        async with connect(p.address) as client, screen(p.address) as (app, pilot):
            await client.allocate(2)
            await pilot.press("2")
            await shows(app, pilot, has("a.......", "1 of 1 rows"))
            table = app._table
            drawn: list[int] = []
            draw = table.render_line

            def counted(y: int) -> Strip:
                drawn.append(y)
                return draw(y)

            monkeypatch.setattr(table, "render_line", counted)
            looked_s = app._readings[p.address].at_s
            await shows(app, pilot, lambda _: app._readings[p.address].at_s > looked_s + 0.5)
            assert drawn == []
