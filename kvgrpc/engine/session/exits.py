"""The end of a child process, in words; its parent reports each end that it did not ask for."""

import signal

UNPREPARED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a `kvgrpc serve` that was told to stop before it was prepared for that."""


def ended_with(code: int) -> str:
    """Returns the words after "ended with": "exit code 3", or "SIGSEGV" for a process that this signal ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
