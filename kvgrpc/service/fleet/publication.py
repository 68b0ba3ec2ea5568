"""The entry of this lead in the registry: it is there while an engine can be reached, and says what changes.

A lead that is killed leaves an entry, which ends with its lease. A registry that does not answer changes nothing here:
the entry is put again when it does.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable

from kvgrpc.core.values.compatibility import EngineDescription, layout_digest, model_digest
from kvgrpc.errors import InvalidRequest
from kvgrpc.fleet.entry import ITEMS_MAX, EngineEntry, EngineRole
from kvgrpc.service.engine_watchers import INTERVAL_S
from kvgrpc.service.fleet.registries import Published, publisher_of
from kvgrpc.service.lead import Lead

_log = logging.getLogger(__name__)
WITHDRAW_S = 1.0
"""Time that the end of a server leaves to the registry for an answer, in seconds."""


class LeadPublication:
    """Publishes a lead, from `start` to `stop`, and tells the lead how that goes. Raises InvalidRequest for a file of
    the settings that is not usable.
    """

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._fleet = lead.config.fleet
        lead.publication = self
        self._publish = publisher_of(self._fleet)
        self._entries = LeadEntries(lead)
        self._shown: EngineEntry | None = None
        self._present: tuple[Published, asyncio.Task[None]] | None = None
        self._ended: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._refused = ""
        """Reason why this lead has no entry that could be published; empty if it has one."""

    @property
    def used(self) -> bool:
        """True if there is a registry to publish in."""
        return self._publish is not None

    @property
    def published(self) -> bool:
        """True while the registry has this life's entry."""
        return self._present is not None and self._present[0].published.is_set()

    @property
    def failure(self) -> str:
        """Reason why the registry lacks the entry; empty if it has it, or if there is nothing to publish."""
        return self._refused or (self._present[0].failure if self._present is not None else "")

    def start(self) -> None:
        """Begins to publish, if there is a registry for that."""
        if self._publish is not None:
            self._task = asyncio.create_task(self._run(self._publish))

    async def stop(self) -> None:
        """Removes the entry. A registry that does not answer ends it with its lease."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._leave()
        if self._ended:
            await asyncio.wait(self._ended, timeout=WITHDRAW_S)
        for task in self._ended:
            task.cancel()

    async def _run(self, publish: Callable[[EngineEntry], Published]) -> None:
        with self._lead.engine_watchers.one() as watcher:
            while True:
                self._show(publish)
                watcher.told()
                await watcher.wait(INTERVAL_S)

    def _show(self, publish: Callable[[EngineEntry], Published]) -> None:
        """Lets the registry show this lead as it is now."""
        entry, last = self.entry(), self._shown
        if entry == last:
            return
        self._shown = entry
        if entry is not None and last is not None and self._present is not None and _life(entry) == _life(last):
            self._present[0].update(entry)
            return
        self._leave()
        if entry is not None:
            made = publish(entry)
            self._present = made, asyncio.create_task(made.run())

    def entry(self) -> EngineEntry | None:
        try:
            entry = self._entries.present()
            if entry is not None:
                entry.to_json()
        except InvalidRequest as error:
            if not self._refused:
                _log.warning("this engine is not published: %s", error)
            self._refused = str(error)
            return None
        self._refused = ""
        return entry

    def _leave(self) -> None:
        """Begins to remove the present entry."""
        present, self._present = self._present, None
        if present is not None:
            task = asyncio.create_task(_withdrawn(*present))
            self._ended.add(task)
            task.add_done_callback(self._ended.discard)


class LeadEntries:
    """The entries of one lead, one for each life of its engine."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._host = lead.config.fleet.host or socket.gethostname()
        self._life = 0
        self._of: tuple[int, EngineDescription | None] = 0, None
        self._digests = "", ""

    def present(self) -> EngineEntry | None:
        """Returns the entry of the present life; None: there is no engine."""
        life, fleet = self._lead.runner.node.state.life, self._lead.config.fleet
        known = life.description
        if known is None:
            return None
        if self._of[0] != known.incarnation:
            # By the clock, so that it is greater than in the life of another process before this one.
            self._life = max(time.time_ns() // 1_000, self._life + 1)
        if self._of[1] is not known:
            self._digests = model_digest(fleet.model, known.weights_revision), layout_digest(known)
        self._of = known.incarnation, known
        model, layout = self._digests
        return EngineEntry(
            known.engine_id,
            fleet.published_addresses or (known.address,),
            known.incarnation,
            self._life,
            EngineRole(fleet.role),
            model,
            layout,
            _data_paths(self._lead),
            self._host,
            fleet.tenant,
            life.draining,
            self._lead.version,
            fleet.model,
        )


def _data_paths(lead: Lead) -> tuple[str, ...]:
    """Returns the data paths that work here. A worker's own are not known to its lead: then those of the settings."""
    known = lead.data_paths()
    return tuple(name for name, works, _ in known if works)[:ITEMS_MAX] if known else lead.config.data_paths[:ITEMS_MAX]


def _life(entry: EngineEntry) -> tuple[str, int]:
    return entry.engine_id, entry.incarnation


async def _withdrawn(publication: Published, running: "asyncio.Task[None]") -> None:
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await publication.withdraw()
