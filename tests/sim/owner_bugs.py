"""Bugs about owners and contents: whoever calls is taken for the engine, or for who may have the content."""

from dataclasses import replace
from typing import Any

from kvgrpc.core.values.owners import ENGINE


def handed_over_by_anybody(check: Any) -> Any:
    """Blocks are handed over by whoever names them."""

    def checked(self: Any, event: Any, *args: Any, **fields: Any) -> Any:
        return check(self, replace(event, call=replace(event.call, principal=ENGINE)), *args, **fields)

    return checked


def filled_for_anybody(check_destination: Any) -> Any:
    """Blocks are filled for whoever names them."""
    return lambda state, where, tokens, _, **fields: check_destination(state, where, tokens, ENGINE, **fields)


def claimed(_: Any) -> Any:
    """A reader gets what it says it wants, whatever the lease holds."""
    return lambda content, claim: min(content.tokens, claim.tokens)
