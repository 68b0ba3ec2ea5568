"""Texts on a terminal: colours, and what came from outside."""

import os

import typer

from kvgrpc.errors import note

TEXT_BYTES_MAX = 1 << 16
"""Maximum size of one text on the terminal, in bytes. No id is as long."""


def readable(text: str) -> str:
    """Returns a text that anybody may have sent as it may stand on a terminal: in one line, and without commands to the
    terminal.
    """
    return note(text, TEXT_BYTES_MAX)


def coloured(text: str, colour: str) -> str:
    """Returns the text in a colour, or as it is if NO_COLOR is set."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, fg=colour)
