"""The two forms of the log: a line of text, or a JSON object. Both have the fields that a line is about."""

import json
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgrpc.config import Config

FIELDS = ("transfer_id", "request_id", "trace_id", "peer")
"""Names of the fields, as in `kvgrpc.service.event_log`."""


def _fields(record: logging.LogRecord) -> dict[str, str]:
    return {name: value for name in FIELDS if (value := getattr(record, name, ""))}


class TextFormatter(logging.Formatter):
    """Text, with the fields that the message does not name at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        said = super().formatMessage(record)
        rest = [f"{name}={value}" for name, value in _fields(record).items() if value not in record.message]
        return " ".join((said, *rest))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time in UTC, level, logger, message, the fields, and the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said)


def configure(config: "Config") -> None:
    """Writes the log of this process to standard error, as the settings say."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Their debug lines say nothing of kvgrpc.
    for name in ("asyncio", "grpc", "nixl"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
