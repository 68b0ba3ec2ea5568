"""Help of commands in which a flag has no type: it takes no value."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _PlainFlags:
    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc] # of the class beside this one
        for one in found:
            if getattr(one, "is_flag", False) and one.metavar is None:
                one.metavar = ""
        return found


class PlainCommand(_PlainFlags, TyperCommand):
    """A command whose flags have no type in its help."""


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of commands whose flags have no type in its help."""
