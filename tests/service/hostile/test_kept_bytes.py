"""Memory that calls make a server keep: little for small calls, bounded for each caller and for all together."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, lease_pb2, scheduler_pb2
from tests.fuzz import inside
from tests.fuzz.inside import State
from tests.service.api import Api, refused
from tests.service.conftest import starting
from tests.service.engines import Engine, wait_until
from tests.service.footprint import resident_bytes
from tests.service.values import content, dur, for_readers, new_key, push_part

BLOCKS = 65_536
POOL = ("--layers", "1", "--kv-heads", "1", "--head-dim", "4", "--blocks", str(BLOCKS))
SETTINGS = """[limits]
lease_ttl_s = 300.0
connect_timeout_s = 0.5
kept_bytes = 8_000_000
kept_bytes_per_caller = 4_000_000
request_ttl_s = 2.0
"""
KEPT_BYTES_MAX = 4 << 20
"""Maximum memory kept after any number of calls of one kind, in bytes, without what the ledger grants."""
BACK_S = 15.0


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, State]]:
    with starting(tmp_path_factory.mktemp("kept")) as start:
        (engine,) = start(POOL, settings=SETTINGS, **inside.ENVIRONMENT)
        with closing(State(engine.process.pid)) as state:
            yield engine, state


@pytest.fixture
def engine(bounded: tuple[Engine, State]) -> Iterator[Engine]:
    yield bounded[0]
    bounded[0].reset()


def resident(bounded: tuple[Engine, State]) -> int:
    bounded[1].collect()
    bounded[1].trim()
    return resident_bytes(bounded[0].process.pid)


def kept(engine: Engine) -> admin_pb2.Kept:
    return engine.api.admin.GetStatus(admin_pb2.GetStatusRequest()).kept


def whole(engine: Engine) -> common_pb2.Blocks:
    """Returns all blocks of the pool as one run."""
    ids = engine.allocate(BLOCKS)
    assert len(ids) == BLOCKS
    return engine.named(common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[0], counts=[BLOCKS])))


def opaque(tokens: int = BLOCKS * 16) -> common_pb2.Content:
    return common_pb2.Content(opaque_id=b"x" * 32, opaque_tokens=tokens)


def chain(tokens: int) -> common_pb2.Content:
    """Returns a content with a digest of two bytes for each token."""
    return common_pb2.Content(chain=common_pb2.ContentChain(digests=b"d" * (2 * tokens), token_count=tokens))


def test_leases_of_one_long_run_keep_no_ids(bounded: tuple[Engine, State], engine: Engine) -> None:
    request = lease_pb2.GrantLeaseRequest(blocks=whole(engine), content=opaque())
    engine.api.leases.GrantLease(request)
    before = resident(bounded)
    for number in range(300):
        request.idempotency_key = f"k-{number}" if number % 2 else ""
        engine.api.leases.GrantLease(request)
    assert resident(bounded) - before < KEPT_BYTES_MAX
    assert kept(engine).bytes_by_kind["lease"] < 300 * 8_000


def test_hand_overs_of_one_long_run_keep_no_ids(bounded: tuple[Engine, State], engine: Engine) -> None:
    blocks = whole(engine)
    readers = for_readers(blocks=blocks, content=opaque())
    part = push_part(blocks=blocks, content=opaque())
    before = resident(bounded)
    for request in (readers, part):
        for _ in range(100):
            request.transfer_key = new_key()
            engine.api.handoff.FinishedBlocks(request)
    assert resident(bounded) - before < KEPT_BYTES_MAX


def test_a_caller_that_has_its_part_is_refused_until_something_of_it_ends(engine: Engine) -> None:
    request = lease_pb2.GrantLeaseRequest(blocks=engine.blocks(engine.allocate(4_096)), content=chain(65_536))
    made = []
    with refused(engine.api, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
        while True:
            made.append(engine.api.leases.GrantLease(request))
    assert 5 < len(made) < 40
    with closing(Api(engine.address)) as other:
        other.leases.GrantLease(request)
        named = [row.caller for row in kept(engine).largest_callers]
        assert len(named) == 2
    engine.release(made[0].lease.lease_id)
    engine.api.leases.GrantLease(request)


def test_callers_together_have_no_more_than_all_of_it(engine: Engine) -> None:
    request = lease_pb2.GrantLeaseRequest(blocks=engine.blocks(engine.allocate(4_096)), content=chain(65_536))
    with ExitStack() as stack:
        for _ in range(3):
            api = Api(engine.address)
            stack.callback(api.close)
            with refused(api, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
                while True:
                    api.leases.GrantLease(request)
        found = kept(engine)
        assert found.caller_bytes <= found.caller_bytes_max == 8_000_000


def test_requests_of_a_scheduler_are_bounded_and_end_when_it_is_silent(engine: Engine) -> None:
    arrived = scheduler_pb2.RequestArrivedRequest(request_id="r-0", prompt=content(range(200_000)))
    with closing(Api(engine.address)) as other:
        count = 0
        with refused(other, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
            while True:
                count += 1
                arrived.request_id = f"r-{count}"
                other.scheduler.RequestArrived(arrived)
        assert 1 < count < 10
        assert kept(engine).bytes_by_kind["request"] <= 4_000_000
    wait_until(lambda: "request" not in kept(engine).bytes_by_kind, BACK_S)


def test_a_request_lasts_as_long_as_its_scheduler_polls(engine: Engine) -> None:
    arrived = scheduler_pb2.RequestArrivedRequest(request_id="lasts", prompt=content(range(40)))
    engine.api.scheduler.RequestArrived(arrived)
    began = kept(engine).bytes_by_kind["request"]
    for _ in range(8):
        engine.api.scheduler.PollSchedulerNews(scheduler_pb2.PollSchedulerNewsRequest(wait=dur(0.5)))
    assert kept(engine).bytes_by_kind["request"] == began
    engine.api.scheduler.AbortRequest(scheduler_pb2.AbortRequestRequest(request_id="lasts"))
    assert "request" not in kept(engine).bytes_by_kind
