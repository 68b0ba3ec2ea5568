"""Reload of settings: SIGHUP makes a server read its configuration again."""

import logging
import signal
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from kvgrpc.config import Config
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from kvgrpc.server import Server

RELOADED = ("dial_allow", "drain_s")
"""Settings that change while the server runs. The files of `tls`, `identity` and `tokens` are watched anyway."""
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
        others = [one.name for one in fields(Config) if getattr(read, one.name) != getattr(self.settings, one.name)]
        now, later = [name for name in others if name in RELOADED], [name for name in others if name not in RELOADED]
        self.settings = server.reload(self.settings, {name: getattr(read, name) for name in now})
        _log.info("reloaded: %s", ", ".join(now) or "no setting has changed")
        if later:
            _log.warning("these settings have changed and hold after a restart: %s", ", ".join(later))


def ignore_until_served() -> None:
    """Keeps SIGHUP from ending a server that still starts."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
