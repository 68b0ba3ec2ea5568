"""A caller that floods a lead with far more than it serves takes nothing from others, and leaves nothing behind."""

import asyncio

from grpc_health.v1 import health_pb2

from bench.overload.kinds import prepare
from bench.overload.site import Generator
from tests.service.conftest import Start
from tests.service.engines import SUCCEEDED, Engine
from tests.service.footprint import resident_bytes
from tests.service.values import prompt

BLOCKS = 16
CONNECTIONS = 4
SECONDS = 4.0
RATE = 20_000.0
GROWTH_MAX = 128 << 20
"""Maximum growth of the lead, in bytes: it has 512 calls of the flood at once, of far less than 100 KB each."""


def pull(source: Engine, destination: Engine, block: int, into: int) -> None:
    """Pulls a block by unary calls, each of which is answered, and none of which is refused."""
    sent = source.hand_over(prompt(16), [block])
    transfer = destination.wait(destination.pull(sent.grant, prompt(16), [into]).transfer_id)
    assert transfer.state == SUCCEEDED, transfer


def test_a_flood_takes_nothing_from_another_caller_and_leaves_nothing(start: Start) -> None:
    source, destination = start((), ())
    (block,), (into,) = source.allocate(1), destination.allocate(1)
    pull(source, destination, block, into)
    kinds = asyncio.run(prepare(source.address, destination.address, BLOCKS, None))
    before = peak = resident_bytes(destination.process.pid)
    flood = Generator(destination.address, kinds, None, connections=CONNECTIONS, rate=RATE, seconds=SECONDS)
    flood.begin()
    pulls = 0
    try:
        while not flood.over:
            pull(source, destination, block, into)
            answer = destination.api.health.Check(health_pb2.HealthCheckRequest(service=""), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            peak, pulls = max(peak, resident_bytes(destination.process.pid)), pulls + 1
        found = flood.found()
    finally:
        flood.close()
    assert pulls > 1
    assert found["served"] > 0
    assert found["due"] > 2 * found["served"]
    assert set(found["refused"]) <= {"LIMIT_EXCEEDED"}
    assert peak < before + GROWTH_MAX
    for engine in (destination, source):
        engine.check_alive()
        engine.free([*range(BLOCKS + 1)])
        engine.reset()
