"""Reload of settings: SIGHUP makes a server read its configuration again."""

import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvgrpc.cli.log_format import configure as configure_log
from kvgrpc.config import Config
from kvgrpc.config_sources import changed, reloaded
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from kvgrpc.server import Server

_log = logging.getLogger(__name__)


class Reload:
    """Reads the sources of the settings again. `settings` is what holds; `read` loads and checks all sources."""

    def __init__(self, settings: Config, read: Callable[[], Config]) -> None:
        self.settings = settings
        self._read = read

    def apply(self, server: "Server") -> None:
        """Lets the new values hold. The log says which do, and which wait for a restart. Sources with an error change
        nothing.
        """
        try:
            read = self._read()
        except KVGrpcError as error:
            _log.error("nothing is reloaded: %s", error.sentence)
            return
        held, self.settings = self.settings, reloaded(self.settings, read)
        server.reload(self.settings)
        configure_log(self.settings)
        _log.info("reloaded: %s", ", ".join(changed(held, self.settings)) or "no setting has changed")
        later = list(changed(self.settings, read))
        if later:
            _log.warning("these settings have changed and hold after a restart: %s", ", ".join(later))


def ignore_until_served() -> None:
    """Keeps SIGHUP from ending a server that still starts."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
