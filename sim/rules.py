"""The rules that must hold in every world, and the error for a broken one.

The rules are those of docs/reliability.md. A failed check raises `Violated` with the rule and with the names of the
transfers, leases, accesses and requests that it is about, so that a trace can be cut down to what led there.
"""

from enum import StrEnum
from typing import NoReturn

SLACK_S = 1e-6
"""Time in seconds by which a bound may be passed, because virtual time is rounded."""


class Rule(StrEnum):
    """The rules, by number. `END` must hold when nothing is left to do."""

    R1 = "R1"
    """A block with a pin is never reused; a target is unpinned only when it is at rest."""
    R2 = "R2"
    """Nothing moves before its issuer verified it, nothing is used that was not verified after the last byte."""
    R3 = "R3"
    """Every transfer ends, once, in one state, within a bound known at its start."""
    R4 = "R4"
    """Consumers are counted by identity."""
    R5 = "R5"
    """A side that cannot do its part says so: no failure, return or cancel is lost."""
    R6 = "R6"
    """Nothing that a peer or client sends stops a lead."""
    R7 = "R7"
    """Every wait has a deadline."""
    R8 = "R8"
    """A renewal never shortens a lease, revives none, and never passes the cap."""
    R9 = "R9"
    """Completion is what the data path reports for the transfer itself."""
    R10 = "R10"
    """Same inputs, same outputs."""
    R11 = "R11"
    """KV is used for nothing but what it was computed from."""
    R12 = "R12"
    """Nobody frees, reads, writes or ends what is not its own."""
    R13 = "R13"
    """Among requests that wait for each other the oldest goes on."""
    END = "END"
    """Everything ends, and nothing is held then."""


class Violated(AssertionError):
    """Raised when a rule does not hold."""

    def __init__(self, rule: Rule, message: str, *about: str) -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message
        self.about = about


def broken(rule: Rule, message: str, *about: str) -> NoReturn:
    """Raises Violated for a rule."""
    raise Violated(rule, message, *about)
