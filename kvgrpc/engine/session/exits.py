"""How a child process ended, in words: the parent says it of each that it did not ask to end like that."""

import signal

UNPREPARED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a `kvgrpc serve` that was told to stop when it had just begun, and was not yet prepared for that."""


def ended_with(code: int) -> str:
    """What follows "ended with": "exit code 3", or "SIGSEGV" for a process that this signal ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
