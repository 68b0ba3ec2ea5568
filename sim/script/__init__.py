"""Scenarios as text: prose, commands, and their outcome, replayed in virtual time.

    # Prose begins with a number sign.

    engine P
    engine D
    finish P r1 tokens=64
    pull D r1
    advance 1s
    ----
    P r1: handed over blocks 0-3
    D r1: into blocks 0-3
    0.0s D r1: received 64 tokens, and they are right
    0.0s P r1: blocks 0-3 came back

Commands end with a line `----`. Their outcome follows, up to an empty line. Nothing is random, so a text always has the
same outcome. At the end everything is mended, time passes until nothing is left to do, and no lease, pin, access,
transfer or call may be left over.
"""

from sim.script.line import CommandLine
from sim.script.requests import REQUESTS
from sim.script.stage import ScriptStage
from sim.script.verbs import WORLD, Verbs

VERBS = Verbs(WORLD | REQUESTS)
RULE = "----"
NOTHING = "(nothing)"


class ScriptError(ValueError):
    """Raised when a text is no valid script; names the line."""


def replay(text: str) -> str:
    """Returns the text with the current outcome of its commands.

    Raises ScriptError for a text that is no script, and AssertionError if a rule of the protocol is broken; each names
    the line.
    """
    stage = ScriptStage()
    kept: list[str] = []
    lines = text.splitlines()
    at = 0
    seen: list[str] | None = None
    """Outcome so far; None if no command waits for its line."""
    while at < len(lines):
        line = lines[at]
        at += 1
        kept.append(line)
        if line == RULE:
            kept += seen or [NOTHING]
            seen = None
            while at < len(lines) and lines[at].strip():
                at += 1
        elif line.strip() and not line.startswith("#"):
            seen = (seen or []) + _do(stage, line, at)
    if seen is not None:
        raise ScriptError(f"the last commands have no line {RULE} after them")
    try:
        stage.finish()
    except AssertionError as error:
        error.add_note("at the end, when everything had been mended")
        raise
    return "\n".join(kept) + "\n"


def _do(stage: ScriptStage, text: str, number: int) -> list[str]:
    line = CommandLine(text)
    try:
        VERBS[line.verb](stage, line)
        line.check_used()
        stage.check()
    except ValueError as error:
        raise ScriptError(f"line {number}: {text}: {error}") from error
    except AssertionError as error:
        error.add_note(f"line {number}: {text}")
        raise
    return stage.seen()
