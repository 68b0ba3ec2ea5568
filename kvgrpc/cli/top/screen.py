"""The screen of `kvgrpc top`. Only lines that are visible are made, and only those that changed are drawn again."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.events import Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input, Static

from kvgrpc.cli.top.lead import ROWS_MAX, WatchedLead
from kvgrpc.cli.top.rows import VIEWS, Reading, TopLines, TopRow, arranged, rows_of
from kvgrpc.client import Credentials

KEYS = "q quit  s sort  r reverse  / filter  c cancel  x release  k re-key  d drain  u undrain"
_CURSOR, _PLAIN = Style(reverse=True), Style()
_MARK = "> "
"""Beginning of the chosen line, which shows it without colours, too."""


class RowTable(ScrollView, can_focus=True):
    """Rows with a chosen one. The choice stays on its row when rows move."""

    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move(-20)", show=False),
        Binding("pagedown", "move(20)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._rows: Sequence[TopRow] = ()
        self._lines: TopLines | None = None
        self._at = 0
        self._drawn: dict[int, str] = {}

    @property
    def chosen(self) -> TopRow | None:
        return self._rows[self._at] if self._rows else None

    def show(self, rows: Sequence[TopRow], lines: TopLines) -> None:
        """Takes new rows, and draws those visible lines again that differ."""
        chosen = self.chosen
        self._rows, self._lines = rows, lines
        places = {row.key: index for index, row in enumerate(rows)} if chosen is not None else {}
        self._at = places.get(chosen.key, min(self._at, len(rows) - 1)) if chosen is not None else 0
        self._at = max(0, self._at)
        self.virtual_size = Size(self.size.width, len(rows))
        self._draw_changed()

    def action_move(self, by: int) -> None:
        """Chooses another row and scrolls it into view."""
        self._at = max(0, min(len(self._rows) - 1, self._at + by))
        top, height = int(self.scroll_offset.y), max(1, self.size.height)
        if not top <= self._at < top + height:
            self.scroll_to(y=self._at if self._at < top else self._at - height + 1, animate=False)
        self._draw_changed()

    def _draw_changed(self) -> None:
        top = int(self.scroll_offset.y)
        changed = [y for y in range(self.size.height) if self._text(top + y) != self._drawn.get(y)]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _text(self, index: int) -> str:
        if self._lines is None or not 0 <= index < len(self._rows):
            return ""
        return (_MARK if index == self._at else " " * len(_MARK)) + self._lines.line(index)

    def render_line(self, y: int) -> Strip:
        """Returns one visible line; textual calls it for the lines that are to be drawn."""
        index = int(self.scroll_offset.y) + y
        shown = self._text(index)
        self._drawn[y] = shown
        style = _CURSOR if shown.startswith(_MARK) else _PLAIN
        width = self.size.width
        return Strip([Segment(shown[:width].ljust(width), style)], width)


class Confirmation(ModalScreen[bool]):
    """Asks before something is ended. Only `y` means yes."""

    BINDINGS: ClassVar = [
        Binding("y", "answer(True)", show=False),
        Binding("n,escape,enter,q", "answer(False)", show=False),
    ]
    DEFAULT_CSS = (
        "Confirmation { align: center middle; } Confirmation Static { width: auto; max-width: 90%; border: solid; }"
    )

    def __init__(self, text: str) -> None:
        super().__init__()
        self._question = text

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\ny yes   n no", markup=False)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class TopApp(App[None]):
    """The whole screen: views, the table, and what was said last."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: 1; width: 100%; text-wrap: nowrap; text-overflow: ellipsis; }
    Confirmation Static { height: auto; width: auto; text-wrap: wrap; }
    #head { text-style: bold; }
    RowTable { height: 1fr; }
    Input { height: 1; border: none; padding: 0; display: none; }
    Input.shown { display: block; }
    """
    BINDINGS: ClassVar = [
        *(Binding(str(number), f"view('{name}')", show=False) for number, name in enumerate(VIEWS, 1)),
        Binding("s", "sort", show=False),
        Binding("r", "reverse", show=False),
        Binding("slash", "filter", show=False),
        Binding("c", "cancel", show=False),
        Binding("x", "release", show=False),
        Binding("k", "rekey", show=False),
        Binding("d", "drain(False)", show=False),
        Binding("u", "drain(True)", show=False),
        Binding("escape", "table", show=False),
        Binding("q", "quit", show=False),
    ]

    class Looked(Message):
        """A lead has answered, or is away."""

        def __init__(self, reading: Reading) -> None:
            super().__init__()
            self.reading = reading

    def __init__(
        self, addresses: Sequence[str], credentials: Credentials, *, interval_s: float, timeout_s: float
    ) -> None:
        super().__init__()
        self._addresses, self._credentials = list(dict.fromkeys(addresses)), credentials
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._leads: dict[str, WatchedLead] = {}
        self._wakers: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._readings: dict[str, Reading] = {}
        self._rows: dict[str, list[TopRow]] = {}
        self._view = "engines"
        self._wanted, self._said = "", ""
        self._sort, self._descends = VIEWS["engines"].first, VIEWS["engines"].descends
        self._table = RowTable()

    def compose(self) -> ComposeResult:
        yield Static(id="views", markup=False)
        yield Static(id="head", markup=False)
        yield self._table
        yield Input(placeholder="filter", compact=True)
        yield Static(id="said", markup=False)
        yield Static(KEYS, id="keys", markup=False)

    def on_mount(self) -> None:
        """Begins to ask each lead in a task of its own, so that none waits for another one."""
        self._table.focus()
        for address in self._addresses:
            self._leads[address] = WatchedLead(address, self._credentials, self._timeout_s)
            self._wakers[address] = asyncio.Event()
            self._tasks.append(asyncio.create_task(self._watch(address)))
        self._draw()

    async def on_unmount(self) -> None:
        """Ends the tasks and the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for lead in self._leads.values():
            await lead.close()

    async def _watch(self, address: str) -> None:
        while True:
            self._wakers[address].clear()
            self.post_message(self.Looked(await self._leads[address].look(VIEWS[self._view].asks)))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wakers[address].wait(), self._interval_s)

    def on_top_app_looked(self, message: Looked) -> None:
        """Takes a reading. A view that the reading does not have yet keeps its place until the next one."""
        now = message.reading
        before = self._readings.get(now.address)
        self._readings[now.address] = now
        self._rows[now.address] = rows_of(self._view, now, before)
        self._draw()

    def _draw(self) -> None:
        rows = [row for address in self._addresses for row in self._rows.get(address, ())]
        shown = arranged(rows, self._sort, self._wanted, descends=self._descends)
        lines = TopLines(self._view, shown, max(1, self.size.width - len(_MARK)))
        self._table.show(shown, lines)
        self._put("views", self._views())
        self._put("head", " " * len(_MARK) + lines.head(self._sort, descends=self._descends))
        away = [now.address for now in self._readings.values() if now.error]
        parts = [
            *([self._said] if self._said else []),
            f"{len(shown)} of {len(rows)} rows",
            *([f"filter {self._wanted!r}"] if self._wanted else []),
            *([f"first {ROWS_MAX} of each lead"] if len(rows) >= ROWS_MAX else []),
            *([f"{lines.left_out} columns need a wider terminal"] if lines.left_out else []),
            *([f"away: {', '.join(away)}"] if away else []),
        ]
        self._put("said", "; ".join(parts))

    def _views(self) -> str:
        names = [f"[{name}]" if name == self._view else name for name in VIEWS]
        return " ".join(f"{number} {name}" for number, name in enumerate(names, 1))

    def _put(self, name: str, text: str) -> None:
        place = self.query_one(f"#{name}", Static)
        if str(place.content) != text:
            place.update(text)

    def on_resize(self, _: Resize) -> None:
        self.call_after_refresh(self._draw)

    def action_view(self, view: str) -> None:
        """Shows another view, and asks for it at once."""
        self._view = view
        self._sort, self._descends = VIEWS[view].first, VIEWS[view].descends
        self._rows = {address: rows_of(view, now, None) for address, now in self._readings.items()}
        self._wake()
        self._draw()

    def action_sort(self) -> None:
        self._sort = (self._sort + 1) % len(VIEWS[self._view].columns)
        self._say(f"sorted by {VIEWS[self._view].columns[self._sort][0]}")

    def action_reverse(self) -> None:
        """Turns the order round."""
        self._descends = not self._descends
        self._draw()

    def action_filter(self) -> None:
        """Asks for the text that shown rows have."""
        self.query_one(Input).add_class("shown").focus()

    def action_table(self) -> None:
        """Takes the filter away."""
        place = self.query_one(Input)
        place.value = ""
        place.remove_class("shown")
        self._wanted = ""
        self._table.focus()
        self._draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._draw()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self.query_one(Input).remove_class("shown")
        self._table.focus()

    def action_cancel(self) -> None:
        self._act("transfers", "Cancel transfer {name} at {engine}?", lambda lead, row: lead.cancel(row.name))

    def action_release(self) -> None:
        """Releases the chosen lease."""
        self._act("leases", "Release lease {name} at {engine}?", lambda lead, row: lead.release(row.name))

    def action_rekey(self) -> None:
        """Registers the memory of the chosen quarantine's engine anew."""
        asked = "Register the memory of {engine} anew? It takes no new work meanwhile, and running transfers fail."
        self._act("quarantine", asked, lambda lead, _: lead.rekey())

    def action_drain(self, cancel: bool) -> None:
        """Starts or cancels the drain of the chosen engine."""
        asked = "Let {engine} take work again?" if cancel else "Drain {engine}? It then takes no new work."
        self._act("engines", asked, lambda lead, _: lead.drain(cancel=cancel))

    def _act(self, view: str, asked: str, act: Callable[[WatchedLead, TopRow], Awaitable[str]]) -> None:
        row = self._table.chosen
        if self._view != view or row is None:
            self._say(f"choose one of the {view} first (key {list(VIEWS).index(view) + 1})")
            return
        engine = f"{row.engine_id} ({row.address})" if row.engine_id else row.address

        async def done() -> None:
            self._say(await act(self._leads[row.address], row))
            self._wake()

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(done())

        self.push_screen(Confirmation(asked.format(name=row.name, engine=engine)), answered)

    def _say(self, text: str) -> None:
        self._said = f"{time.strftime('%H:%M:%S')} {text}"
        self._draw()

    def _wake(self) -> None:
        for waker in self._wakers.values():
            waker.set()

    def visible_text(self) -> list[str]:
        """Returns the lines of the main screen as text, for tests and for copies of it."""
        screen: Any = self.screen_stack[0]
        return ["".join(part.text for part in strip).rstrip() for strip in screen._compositor.render_strips()]  # noqa: SLF001 - textual has no public way
