"""Which schedulers are heard, and which requests are theirs: those of one that has gone are not kept for ever."""

from collections.abc import Iterator


class Heard:
    """Requests by the caller that spoke of them last, and when each caller was heard."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, None]] = {}
        self._caller: dict[str, str] = {}
        """Of each request."""
        self._at: dict[str, float] = {}
        """When each caller was heard that has requests."""

    def hear(self, caller: str, now: float) -> None:
        """A caller says something: all its requests go on."""
        if caller in self._at:
            self._at[caller] = now

    def take(self, request_id: str, caller: str, now: float) -> None:
        """A caller says something of a request, which is its own from now on."""
        if self._caller.get(request_id) != caller:
            self.forget(request_id)
            self._caller[request_id] = caller
            self._of.setdefault(caller, {})[request_id] = None
        self._at[caller] = now

    def forget(self, request_id: str) -> None:
        """It is over."""
        caller = self._caller.pop(request_id, None)
        if caller is not None:
            del self._of[caller][request_id]
            if not self._of[caller]:
                del self._of[caller], self._at[caller]

    def silent(self, since: float) -> Iterator[str]:
        """Requests of callers that have said nothing since then."""
        return iter([id_ for caller, at in self._at.items() if at <= since for id_ in self._of[caller]])

    def last_heard(self) -> float | None:
        """When the caller was heard that has been silent for the longest time; None: nobody has a request."""
        return min(self._at.values(), default=None)
