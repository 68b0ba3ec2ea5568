"""The schedulers that were heard, and their requests: requests of a scheduler that has gone are not kept for ever."""

from collections.abc import Iterator


class SchedulerCallers:
    """Requests by the caller that last spoke of them, and the time each caller was last heard."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, None]] = {}
        self._caller: dict[str, str] = {}
        """Callers by request."""
        self._at: dict[str, float] = {}
        """Time each caller with requests was last heard, in seconds on the node's clock."""

    def hear(self, caller: str, now: float) -> None:
        """Notes that a caller was heard: all its requests stay alive."""
        if caller in self._at:
            self._at[caller] = now

    def take(self, request_id: str, caller: str, now: float) -> None:
        """Notes that a caller spoke of a request: the request is its own from now on."""
        if self._caller.get(request_id) != caller:
            self.forget(request_id)
            self._caller[request_id] = caller
            self._of.setdefault(caller, {})[request_id] = None
        self._at[caller] = now

    def forget(self, request_id: str) -> None:
        caller = self._caller.pop(request_id, None)
        if caller is not None:
            del self._of[caller][request_id]
            if not self._of[caller]:
                del self._of[caller], self._at[caller]

    def silent(self, since: float) -> Iterator[str]:
        """Yields the requests of callers not heard after `since`."""
        return iter([id_ for caller, at in self._at.items() if at <= since for id_ in self._of[caller]])

    def last_heard(self) -> float | None:
        """Returns when the longest-silent caller was heard; None: no caller has a request."""
        return min(self._at.values(), default=None)
