"""A file that an operator may change while the server runs."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kvgrpc.config_errors import invalid
from kvgrpc.errors import InvalidRequest

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

FILE_BYTES_MAX = 1 << 20
"""Maximum size of a file, in bytes."""


class WatchedFile(Generic[_T]):
    """The value of a file. `look` reads the file again. A file that is not usable any more changes nothing, and the log
    says so once.
    """

    def __init__(self, field: str, path: Path, parse: Callable[[bytes], _T]) -> None:
        """`parse` makes the value and raises ValueError. Raises InvalidRequest, naming `field`, for an unusable
        file.
        """
        self._field, self._path, self._parse = field, path, parse
        self._data = self._read()
        self.value = self._parsed(self._data)
        self.error = ""
        """Why the file as it is now is not in use; empty if it is in use."""

    def look(self) -> bool:
        """Reads the file. Returns whether the value is another one now."""
        try:
            data = self._read()
            if data == self._data:
                self.error = ""
                return False
            value = self._parsed(data)
        except InvalidRequest as error:
            why = "; ".join(row.description for row in error.violations)
            if why != self.error:
                _log.warning("%s changed and is not usable, so the old content stays in use: %s", self._field, why)
            self.error = why
            return False
        self._data, self.value, self.error = data, value, ""
        _log.info("%s has new content, which is in use now", self._field)
        return True

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise invalid(self._field, f"{self._path} cannot be read: {error.strerror}") from error
        if len(data) > FILE_BYTES_MAX:
            raise invalid(self._field, f"{self._path} has more than {FILE_BYTES_MAX} bytes")
        return data

    def _parsed(self, data: bytes) -> _T:
        try:
            return self._parse(data)
        except (ValueError, RecursionError) as error:
            raise invalid(self._field, f"{self._path}: {error}") from error
