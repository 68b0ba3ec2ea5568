"""Formats messages for logs without their secrets. Protobuf's own text format, which `print` uses, shows secrets."""

from google.protobuf import text_format
from google.protobuf.message import Message

REDACTED = b"[REDACTED]"


def redacted(message: Message) -> str:
    """Returns the message's text with [REDACTED] for fields that the schema marks `debug_redact`, like tokens of grants
    and transfer keys.
    """
    copied = type(message)()
    copied.CopyFrom(message)
    _redact(copied)
    return str(text_format.MessageToString(copied))


def _redact(message: Message) -> None:
    for field, value in message.ListFields():
        if field.GetOptions().debug_redact:
            if field.is_repeated:
                value[:] = [REDACTED] * len(value)
            else:
                setattr(message, field.name, REDACTED)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for row in value if field.is_repeated else [value]:
                _redact(row)
