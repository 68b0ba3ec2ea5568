"""An engine that does what a script says, and reports what it sees.

It trusts only its lead, so it detects a lead that gives blocks back too early, or gives KV other than the one asked
for.
"""

from collections.abc import Callable

from kvgrpc.core.actions import (
    BlocksReturnedNews,
    Cancelled,
    EngineNews,
    FailedNews,
    LayersReceivedNews,
    PartsReturnedNews,
    ReceivedNews,
)
from kvgrpc.core.events import AcknowledgeTransfers, CancelScope, CancelTransfer
from kvgrpc.core.values.owners import ENGINE
from sim.script.hosts import HandHost
from sim.script.jobs import ScriptJob
from sim.script.line import NamedThings
from sim.script.receives import ScriptReceives
from sim.script.sends import ScriptSends
from sim.script.workshop import Workshop
from sim.world.network import Result


class ScriptEngine:
    """One life of an engine. Its reports go to `say`."""

    def __init__(self, host: HandHost, say: Callable[[str], None], weights: str) -> None:
        self.jobs: NamedThings[ScriptJob] = NamedThings()
        """Last hand-over, pull or reservation of each request."""
        self._host = host
        self._tell = say
        self.shop = Workshop(host, weights, self._say)
        self.sending = ScriptSends(host, self.shop, self.jobs, self._say)
        self.receiving = ScriptReceives(host, self.shop, self.jobs, self._say)

    def cancel(self, name: str, key: bytes, scope: CancelScope) -> None:
        """Cancels by transfer key."""

        def give(result: Result) -> None:
            assert isinstance(result, Cancelled)
            self._say(name, f"the cancelling is answered {result.outcome}")

        self._host.call(lambda call: CancelTransfer(call, key=key, scope=scope), ENGINE, give)

    def told(self, news: EngineNews) -> None:
        """Takes the lead's news."""
        if isinstance(news, ReceivedNews):
            self.receiving.received(news)
            self._acknowledge(news.transfer_id)
        elif isinstance(news, FailedNews):
            self._failed(news)
        elif isinstance(news, BlocksReturnedNews):
            self._acknowledge(news.transfer_id)
            # If neither knows it: a registration without parts has no blocks.
            _ = self.sending.returned(news.transfer_id) or self.receiving.returned(news.transfer_id)
        elif isinstance(news, PartsReturnedNews):
            self.sending.parts_returned(news.request_id, news.lease_id)
        elif isinstance(news, LayersReceivedNews):
            self.receiving.layers(news)

    def check_idle(self) -> None:
        """Asserts that everything came back."""
        self.sending.check_idle()
        self.receiving.check_idle()

    def _say(self, name: str, what: str) -> None:
        self._tell(f"{self._host.address} {name}: {what}")

    def _failed(self, news: FailedNews) -> None:
        failure, id_ = news.failure, news.transfer_id
        name = self.receiving.name_of(id_) or self.sending.name_of(id_) or news.request_id
        what = "cancelled" if news.cancelled else f"failed with {failure.reason.value}"
        where = f" in {failure.phase}" if failure.phase else ""
        then = f"; {failure.next.value.lower()}" if failure.next and not news.cancelled else ""
        self._say(name, f"{what}{where}{then}")

    def _acknowledge(self, transfer_id: str) -> None:
        def acknowledge() -> None:
            self._host.call(lambda call: AcknowledgeTransfers(call, (transfer_id,)), ENGINE, lambda _: None)

        self._host.soon(acknowledge)
