"""The values that one half of a window group tells the other: a token, and where the source listens."""

import re
from dataclasses import dataclass

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import DataPathFailed

TOKEN_BYTES = 32
_TOKEN, _LISTENS_AT = "token", "socket"
_NAME = re.compile(r"kvgrpc-window-[0-9a-f]{32}")


@dataclass(frozen=True)
class WindowHalf:
    """One half of a group, as the other half must know it."""

    token: bytes
    """Token that the other half states when the two connect."""
    listens_at: str
    """Abstract name of the source's socket; empty for the destination."""

    @property
    def values(self) -> Values:
        """The half in the form that travels."""
        return (_TOKEN, self.token), (_LISTENS_AT, self.listens_at.encode())


def read_window_half(values: Values, *, listens: bool) -> WindowHalf:
    """Returns the peer's half. Raises DataPathFailed for malformed values: a peer names no other socket than one for
    windows.
    """
    found = dict(values)
    if len(values) != len(found) or set(found) != {_TOKEN, _LISTENS_AT}:
        raise DataPathFailed("a half of a window group tells a token and a socket, each once")
    token, name = found[_TOKEN], found[_LISTENS_AT].decode(errors="replace")
    if len(token) != TOKEN_BYTES:
        raise DataPathFailed(f"the token of a half of a window group has {TOKEN_BYTES} bytes")
    if bool(name) != listens or (listens and not _NAME.fullmatch(name)):
        raise DataPathFailed("only the source of a window group listens, at a socket for windows")
    return WindowHalf(token, name)
