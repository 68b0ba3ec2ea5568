"""A lead that minimal engines attach to one after the other, and one counterpart for all of them."""

from collections.abc import Iterator

import pytest

from kvgrpc.testing import Counterpart
from tests.engine.support import Lead
from tests.testing.minimal import MinimalAdapter


@pytest.fixture(scope="session")
def lead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    made = Lead(tmp_path_factory.mktemp("lead"), "author")
    try:
        yield made.wait_ready()
    finally:
        made.close()


@pytest.fixture(scope="session")
def other(lead: Lead) -> Iterator[Counterpart]:
    with MinimalAdapter(lead.socket_path) as engine:
        made = Counterpart(engine.engine)
    lead.wait_no_engine()
    with made:
        yield made
