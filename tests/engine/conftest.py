"""Two leads that all tests of a worker process share. Engines attach to them and leave.

Time limits are short where a test waits for one to pass, and long where it must not pass by accident.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engine.private_side import Teams
from tests.engine.support import Lead, Side, Workers

SETTINGS = """
[limits]
lease_ttl_s = 300.0
open_wait_s = 4.0
announce_wait_s = 4.0
connect_timeout_s = 20.0
peer_grace_s = 30.0
settle_timeout_s = 2.0
"""

Attach = Callable[..., Side]
Leads = tuple[Lead, Lead]
"""The leads of P and D."""


@pytest.fixture(scope="session")
def leads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leads]:
    """Runs the leads of P and D."""
    folder = tmp_path_factory.mktemp("leads")
    with ExitStack() as stack:
        p, d = (Lead(folder, name, settings=SETTINGS) for name in ("P", "D"))
        for lead in (p, d):
            stack.callback(lead.close)
        yield p.wait_ready(), d.wait_ready()


@pytest.fixture
def attach() -> Iterator[Attach]:
    """Attaches engines, and closes them at the end of the test."""
    with ExitStack() as stack:

        def begin(lead: Lead, **options: Any) -> Side:
            side = Side(lead, **options)
            stack.callback(side.close)
            return side

        yield begin


@pytest.fixture
def pair(leads: Leads, attach: Attach) -> tuple[Side, Side]:
    """Returns an engine on each lead. The first one has the KV, and the second one wants it."""
    return attach(leads[0]), attach(leads[1])


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def teams(workers: Workers) -> Teams:
    """Returns two workers for P and two for D."""
    return [workers.make(), workers.make()], [workers.make(), workers.make()]
