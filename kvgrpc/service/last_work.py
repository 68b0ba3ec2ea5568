"""The work in progress of a server that is told to end."""

import asyncio
import logging

from kvgrpc.service.runner import Runner

_log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05


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
            _log.info("draining for at most %g s: %d transfers and %d leases are going on", most_s, *self._left())
        while any(self._left()) and loop.time() < until and not self._hurried:  # noqa: ASYNC110 - once in a process
            await asyncio.sleep(DRAIN_POLL_S)
        if any(self._left()):
            _log.warning("stopping: %d transfers and %d leases end with the server", *self._left())

    def _left(self) -> tuple[int, int]:
        state = self._runner.node.state
        return len(state.transfers.unfinished()), len(state.send.leases)
