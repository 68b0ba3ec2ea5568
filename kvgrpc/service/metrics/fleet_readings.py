"""The readings of a server of FleetService alone."""

from collections.abc import Iterator

import grpc

from kvgrpc.core.values.limits import PROTOCOL_MAX
from kvgrpc.fleet.directory import EngineState
from kvgrpc.service.call_queue import CallQueue
from kvgrpc.service.call_records import CallRecords
from kvgrpc.service.fleet.reader import FleetReader, PickOutcome
from kvgrpc.service.metrics import families as of
from kvgrpc.service.metrics.readings import Reading, by, one, queued
from kvgrpc.service.metrics.records import LoopLag


class FleetMetrics:
    """All metrics of such a server."""

    def __init__(self, reader: FleetReader, calls: CallRecords, queue: CallQueue, version: str) -> None:
        self._reader, self._calls, self._queue, self._version = reader, calls, queue, version
        self.lag = LoopLag()
        calls.counting = True

    def read(self) -> Iterator[Reading]:
        """Yields all readings. Call it on the event loop."""
        reading = self._reader.present
        if reading is not None:
            reading.look()
            found = reading.history.counts("")
            refused = reading.directory.refusals
            yield by(of.FLEET_ENTRIES, {state.value: found.get(state, 0) for state in EngineState})
            yield one(of.FLEET_SILENCE, reading.silence_s())
            yield one(of.FLEET_REFUSED, refused.unreadable + refused.too_many)
        yield by(of.FLEET_PICKS, {outcome.value: self._reader.picks[outcome] for outcome in PickOutcome})
        yield from queued(self._queue)
        yield of.CALL_SECONDS, ((("grpc", *labels), seconds) for labels, seconds in self._calls.seconds.items())
        yield one(of.LOOP_LAG, self.lag.seconds)
        yield of.BUILD_INFO, [((self._version, grpc.__version__, str(PROTOCOL_MAX)), 1)]
