"""Errors of settings."""

from kvgrpc.errors import FieldViolation, InvalidRequest, Reason, note

NAME_BYTES_MAX = 256
"""Maximum size of a setting's name in a refusal, in bytes."""
DESCRIPTION_BYTES_MAX = 2_048
"""Maximum size of a refusal's text, in bytes: some list all settings."""


def invalid(field_name: str, description: str) -> InvalidRequest:
    """Returns the error for an unusable setting, in one line whatever was set."""
    violation = FieldViolation(note(field_name, NAME_BYTES_MAX), note(description, DESCRIPTION_BYTES_MAX))
    return InvalidRequest(Reason.INVALID_FIELD, "the configuration is not usable", violations=(violation,))
