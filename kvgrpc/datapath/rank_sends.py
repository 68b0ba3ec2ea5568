"""Sends of this rank, and sends that it asks of peers' ranks. Only the mover's thread uses them."""

from collections.abc import Callable, Iterable

from kvgrpc.core.events import SendPosted, SendWanted
from kvgrpc.core.values.sends import SendAnswer, SendAsk, Values
from kvgrpc.datapath.base import DataPath, DataPathFailed, DataPathUnavailable, NotMet, SentByPeers
from kvgrpc.datapath.reports import Report


class RankSends:
    """Connects the data path by which ranks send, if there is one, to the reports of the mover."""

    def __init__(
        self,
        rank: int,
        paths: Iterable[DataPath],
        later: Callable[[Callable[[], None]], None],
        report: Callable[[Report], None],
    ) -> None:
        self._rank = rank
        self._report = report
        self._path = next((path for path in paths if isinstance(path, SentByPeers)), None)
        if self._path is not None:
            self._path.bind(later, self._want)

    def send(self, name: str, peer: str, ask: SendAsk) -> None:
        """Begins to send; SendPosted answers, once."""

        def posted(values: Values, error: NotMet | None) -> None:
            message, permanent = error.message if error else "", isinstance(error, DataPathUnavailable)
            self._report(SendPosted(self._rank, name, values, message, permanent))

        if self._path is None:
            posted((), DataPathFailed("this rank has no data path by which it sends"))
        else:
            self._path.send(peer, ask, posted)

    def answered(self, peer: str, answer: SendAnswer) -> None:
        if self._path is not None:
            self._path.answered(peer, answer)

    def _want(self, peer: str, posting_id: str, ask: SendAsk) -> None:
        self._report(SendWanted(self._rank, peer, posting_id, ask))
