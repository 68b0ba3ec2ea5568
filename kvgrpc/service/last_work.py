"""The work in progress of a server that is told to end."""

import asyncio
import logging

from kvgrpc.errors import note
from kvgrpc.service.event_log import about
from kvgrpc.service.runner import Runner

_log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05

NAMED = 5
"""Number of transfers, and of leases, that a line of the log names: the oldest."""


class LastWork:
    """The wait for transfers and leases before a server stops."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._hurried = False

    def hurry(self) -> None:
        """Ends the wait, or the one to come, at once."""
        self._hurried = True

    async def wait(self, most_s: float) -> None:
        """Waits until no transfer and no lease is left, for at most `most_s` seconds. Logs what it waits for."""
        loop = asyncio.get_running_loop()
        until = loop.time() + most_s
        if any(self._left()) and most_s > 0:
            line = "draining for at most %g s: %d transfers and %d leases are going on; a second signal ends them"
            _log.info(line, most_s, *self._left())
            self._name_what_is_left(logging.INFO)
        while any(self._left()) and loop.time() < until and not self._hurried:  # noqa: ASYNC110 - once in a process
            await asyncio.sleep(DRAIN_POLL_S)
        if any(self._left()):
            _log.warning("stopping: %d transfers and %d leases end with the server", *self._left())
            self._name_what_is_left(logging.WARNING)

    def _left(self) -> tuple[int, int]:
        state = self._runner.node.state
        return len(state.transfers.unfinished()), len(state.send.leases)

    def _name_what_is_left(self, level: int) -> None:
        """Logs the oldest transfers and leases, one a line, with their owners. Names from outside are quoted."""
        state = self._runner.node.state
        for t in state.transfers.unfinished()[:NAMED]:
            line = "in progress: transfer %s (%s, %s) of %r, request %r, peer %r"
            said = t.id, t.direction.name, t.state.name, t.owner, t.request_id, t.peer_engine_id
            _log.log(level, line, *said, extra=about(t))
        for lease in sorted(state.send.leases, key=lambda lease: lease.granted)[:NAMED]:
            line = "in progress: lease %s of %r, request %r"
            about_it = {"request_id": note(lease.request_id)}
            _log.log(level, line, lease.id, lease.owner, lease.request_id, extra=about_it)
