"""Prints the measured figures."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for kind in ("passed", "failed"):
        for report in terminalreporter.getreports(kind):
            for name, value in report.user_properties:
                if name == "figures":
                    terminalreporter.write_line(str(value))
