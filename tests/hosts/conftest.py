"""The system, started once for each data path."""

from collections.abc import Iterator

import pytest

from tests.hosts.system import PATHS, System, running
from tests.service.conftest import TEST_S


@pytest.fixture(scope="session", params=PATHS)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("system"), request.param) as made:
        yield made


@pytest.fixture
def system(started: System) -> Iterator[System]:
    """Yields the system with a whole network. Afterwards everything has to come to rest by itself."""
    yield started
    started.restore()
    for engine in started.engines.values():
        engine.reset()


SLOW = {
    "test_a_cut_of_one_way_ends_what_crosses_it_with_a_reason_and_gives_the_blocks_back[nixl-p1-d1]",
    "test_a_cut_of_one_way_ends_what_crosses_it_with_a_reason_and_gives_the_blocks_back[nixl-d1-p1]",
    "test_a_host_that_is_cut_off_gets_no_requests_and_is_used_again_when_it_is_back[nixl]",
    "test_engines_without_etcd_go_on_with_the_last_list_marked_stale[nixl]",
    "test_a_router_sends_requests_to_pairs_of_the_fleet_on_a_slow_network[nixl]",
    "test_a_partition_between_ranks_fails_what_crosses_it_and_their_engines_go_on[collective-pull]",
    "test_a_partition_between_ranks_fails_what_crosses_it_and_their_engines_go_on[collective-push]",
    "test_a_partition_between_ranks_fails_what_crosses_it_and_their_engines_go_on[nixl-push]",
    "test_a_short_cut_between_a_rank_and_its_lead_ends_nothing[collective]",
}
"""Cases that only `make hosts` and `make slowtest` run: each is played over the other data path, or by the other kind.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "hosts":
            item.add_marker(pytest.mark.timeout(TEST_S))
            if item.name in SLOW:
                item.add_marker(pytest.mark.slow)
