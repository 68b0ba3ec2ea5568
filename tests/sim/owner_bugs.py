"""Planted bugs of ownership and content: every caller passes for the engine, or may read content it does not have."""

from dataclasses import replace
from typing import Any

from kvgrpc.core.values.owners import ENGINE


def handed_over_by_anybody(check: Any) -> Any:
    """Anybody who names blocks may hand them over."""

    def checked(self: Any, event: Any, *args: Any, **fields: Any) -> Any:
        return check(self, replace(event, call=replace(event.call, principal=ENGINE)), *args, **fields)

    return checked


def filled_for_anybody(check_destination: Any) -> Any:
    """Anybody who names blocks may have them filled."""
    return lambda state, where, tokens, _, **fields: check_destination(state, where, tokens, ENGINE, **fields)


def claimed(_: Any) -> Any:
    """A reader gets the content it claims, whatever the lease holds."""
    return lambda content, claim: min(content.tokens, claim.tokens)
