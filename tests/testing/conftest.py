"""A lead that minimal engines attach to one after the other, and a counterpart for those with as many ranks."""

from collections.abc import Iterator

import pytest

from kvgrpc.testing import Counterpart
from tests.engine.support import Lead
from tests.testing.minimal import MinimalAdapter
from tests.testing.split import SplitAdapter


@pytest.fixture(scope="session")
def lead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    made = Lead(tmp_path_factory.mktemp("lead"), "author")
    try:
        yield made.wait_ready()
    finally:
        made.close()


def counterpart(kind: type[MinimalAdapter], lead: Lead) -> Counterpart:
    with kind(lead.socket_path) as engine:
        made = Counterpart(engine.engine)
    lead.wait_no_engine()
    return made


@pytest.fixture(scope="session")
def other(lead: Lead) -> Iterator[Counterpart]:
    with counterpart(MinimalAdapter, lead) as made:
        yield made


@pytest.fixture(scope="session")
def others(lead: Lead, other: Counterpart) -> Iterator[dict[int, Counterpart]]:
    """Counterparts by their number of ranks."""
    with counterpart(SplitAdapter, lead) as made:
        yield {1: other, SplitAdapter.RANKS: made}
