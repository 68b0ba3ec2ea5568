"""The driver of a policy: takes the scheduler's hooks, and asks for transfers. All rules are the policy's.

A shell is a subclass that has the transfers: `kvgrpc.engine.scheduler.scheduler` on an engine's session,
`kvgrpc.service.scheduler` in the lead. The driver knows each transfer's request, and tells the shell what to ask for;
the shell reports how its transfers fare. Nothing here waits for a transfer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvgrpc.core.policy.policy import Policy
from kvgrpc.core.policy.request import without_backoff
from kvgrpc.core.policy.spec import RequestSpec, Source
from kvgrpc.core.policy.values import (
    Admitted,
    Arrival,
    Begin,
    Cancel,
    Finished,
    GiveUp,
    HandOverBlocks,
    HandOverPart,
    Loss,
    Match,
    ModeChoice,
    News,
    Outcome,
    RequestSide,
    Reserve,
    Rules,
    Start,
    Table,
    Task,
)
from kvgrpc.errors import KVGrpcError, NextStep

RENEW_S = 1.0
"""Interval of `renew_awaited` calls, in seconds; within the firm time of a hand-over, even if one call is lost."""
KEYS_MAX = 4_096
"""Maximum number of keys in one call to a source."""

Spec = TypeVar("Spec", bound=RequestSpec[Any])
Name = TypeVar("Name")
TransferRef = TypeVar("TransferRef")


@dataclass(eq=False)
class DrivenRequest(Generic[Spec, Name, TransferRef]):
    """A request with its transfers. Shells add fields of their own."""

    spec: Spec
    given: Name | None = None
    """The name of the KV that goes; None until it is known."""
    transfers: dict[RequestSide, TransferRef] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.spec.request_id


Driven = TypeVar("Driven", bound=DrivenRequest[Any, Any, Any])


class PolicyDriver(ABC, Generic[Spec, Driven, TransferRef]):
    """The driver of one engine's policy. Not thread-safe. Its hooks are those of `Policy`."""

    def __init__(self, rules: Rules, tell: Callable[[News], None]) -> None:
        """`tell` gets the news for the scheduler."""
        self._tell = tell
        self._make: dict[type[Task], Callable[[Driven, Any], TransferRef | None]] = {
            Begin: self._begin,
            Reserve: self._reserve,
            HandOverBlocks: self._hand_over,
            HandOverPart: self._part,
            GiveUp: self._give_up,
        }
        self._begin_life(rules)

    def _begin_life(self, rules: Rules) -> None:
        """Begins a life of the engine, in which no request is known."""
        self.policy = Policy(rules)
        self._known: dict[str, Driven] = {}
        self._of: dict[TransferRef, tuple[Driven, RequestSide]] = {}
        """Transfers that may still use their blocks -> request and side."""

    # ---- hooks of the scheduler

    def arrived(self, spec: Spec) -> Admitted:
        """Takes a request. Raises what `Policy.arrived`, `RequestSpec.arrival`, `_let_in` and `_register` raise, and
        OutOfRange (CONTENT_RANGE) for a push whose parts have no name. An error changes nothing.
        """
        arrival = spec.arrival(self.policy.rules)
        admitted = self.policy.admits(arrival)
        if spec.request_id not in self.policy:
            self._known[spec.request_id] = self._admit(spec, arrival)
        self.policy.arrived(arrival)
        self._perform_tasks(spec.request_id)
        return admitted

    def renew_awaited(self) -> bool:
        """Asks the sources of pushes that may still come, or go on, to keep their blocks. Returns whether there are
        any.
        """
        found: dict[tuple[str, str], list[Driven]] = {}
        for request in self._known.values():
            source = request.spec.take
            if isinstance(source, Source) and source.address and self.policy.awaits(request.id):
                found.setdefault((source.address, source.engine_id), []).append(request)
        for requests in found.values():
            for at in range(0, len(requests), KEYS_MAX):
                self._renew(requests[at : at + KEYS_MAX])
        return bool(found)

    def match(self, request_id: str, computed_tokens: int) -> Match:
        return self.policy.match(request_id, computed_tokens)

    def allocated(
        self, request_id: str, table: Table, computed_tokens: int, external_tokens: int, after_step: int = 0
    ) -> None:
        self.policy.allocated(request_id, table, computed_tokens, external_tokens, after_step)
        self._perform_tasks(request_id)

    def wanted(self, request_id: str) -> bool:
        """See `Policy.wanted`. Raises what `RequestSpec.first` raises; an error changes nothing."""
        request = self._known.get(request_id)
        if request is None:
            return False
        given = request.given or request.spec.first(without_backoff(self.policy.rules, request.spec.prompt_tokens))
        if not self.policy.wanted(request_id):
            return False
        request.given = given
        return True

    def computed(self, request_id: str, table: Table, computed_tokens: int, step: int) -> None:
        self.policy.computed(request_id, table, computed_tokens, step)
        self._perform_tasks(request_id)

    def loaded(self, request_id: str) -> None:
        self.policy.loaded(request_id)
        self._perform_tasks(request_id)

    def preempted(self, request_id: str) -> None:
        self.policy.preempted(request_id)
        self._perform_tasks(request_id)

    def _finish(
        self,
        request_id: str,
        first: Callable[[int], Any] | None,
        table: Table,
        computed: int,
        outcome: Outcome,
        step: int,
    ) -> Finished:
        """Calls `Policy.finished`, and raises what that raises; an error changes nothing. `first`: like
        `RequestSpec.first`, for prompt and answer; None: the prompt is all.
        """
        request = self._known.get(request_id)
        tokens, given = self.policy.given_tokens(request_id, computed, outcome), None
        if request is not None and request.given is None and tokens:
            given = (first or request.spec.first)(tokens)
        finished = self.policy.finished(request_id, table, computed, outcome, step)
        if given is not None and request is not None:
            request.given = given
        self._perform_tasks(request_id)
        return finished

    def aborted(self, request_id: str, message: str = "aborted") -> Finished:
        finished = self.policy.aborted(request_id, message)
        self._perform_tasks(request_id)
        return finished

    def abort_all(self, message: str) -> None:
        """Aborts every request that is known."""
        for request_id in list(self._known):
            self.aborted(request_id, message)

    def _admit(self, spec: Spec, arrival: Arrival) -> Driven:
        request, give = self._let_in(spec, arrival), arrival.give
        if give is None or give.mode is not ModeChoice.PUSH or not arrival.prompt_tokens:
            return request
        if give.prefill:  # a push names its parts before all of them are there
            request.given = spec.first(without_backoff(self.policy.rules, arrival.prompt_tokens))
        if spec.target:
            self._follow(request, RequestSide.GIVE, self._register(request))
        return request

    # ---- done by a shell, which raises KVGrpcError for a request that it cannot make: a loss like any other

    @abstractmethod
    def _let_in(self, spec: Spec, arrival: Arrival) -> Driven:
        """Lets a request in. Raises KVGrpcError to refuse it."""

    @abstractmethod
    def _register(self, request: Driven) -> TransferRef:
        """Registers the push at the target that the request brought."""

    @abstractmethod
    def _begin(self, request: Driven, task: Begin) -> TransferRef: ...

    @abstractmethod
    def _reserve(self, request: Driven, task: Reserve) -> TransferRef: ...

    @abstractmethod
    def _hand_over(self, request: Driven, task: HandOverBlocks) -> TransferRef: ...

    @abstractmethod
    def _part(self, request: Driven, task: HandOverPart) -> TransferRef: ...

    @abstractmethod
    def _give_up(self, request: Driven, task: GiveUp) -> TransferRef | None:
        """Gives up a push. Returns None if no transfer is left that could end."""

    @abstractmethod
    def _start(self, request: Driven, transfer: TransferRef, task: Start) -> None: ...

    @abstractmethod
    def _start_over(self, request: Driven, transfer: TransferRef) -> None: ...

    @abstractmethod
    def _end(self, request: Driven, transfer: TransferRef, message: str) -> None:
        """Cancels a transfer; its end is reported."""

    @abstractmethod
    def _renew(self, requests: list[Driven]) -> None:
        """Asks the common source of these requests to renew. Nobody waits for the answer."""

    def _loss(self, error: KVGrpcError) -> Loss:
        return Loss(error.reason, error.sentence, NextStep.RECOMPUTE)

    def _forgotten(self, request: Driven) -> None:
        """Notes that nothing of a request is kept any more."""

    # ---- tasks

    def _perform_tasks(self, request_id: str) -> None:
        request = self._known.get(request_id)
        for task in self.policy.take_tasks():
            assert request is not None, "the policy knows no request that is not known here"
            assert task.request_id == request_id, "a hook is about one request"
            self._perform(request, task)
        if request is not None:
            self._tell_news(request)

    def _perform(self, request: Driven, task: Task) -> None:
        """Performs a task that makes or extends a transfer, or acts on one. On a transfer at rest it does nothing."""
        side = RequestSide.TAKE if isinstance(task, Begin | Start | Reserve) else RequestSide.GIVE
        if isinstance(task, Cancel):
            side = task.side
        make, transfer = self._make.get(type(task)), request.transfers.get(side)
        try:
            if make is not None:
                self._follow(request, side, make(request, task))
            elif transfer in self._of:
                self._act(request, transfer, task)
        except KVGrpcError as error:
            self._lost(request, side, self._loss(error))

    def _act(self, request: Driven, transfer: TransferRef, task: Task) -> None:
        if isinstance(task, Start):
            self._start(request, transfer, task)
        elif isinstance(task, Cancel):
            self._end(request, transfer, task.message)
        else:
            self._start_over(request, transfer)

    def _lost(self, request: Driven, side: RequestSide, loss: Loss) -> None:
        self.policy.failed(request.id, side, loss)
        transfer = request.transfers.get(side)
        if transfer in self._of:
            self._end(request, transfer, loss.message)
        else:
            self.policy.returned(request.id, side)
        self._tell_news(request)

    def _follow(self, request: Driven, side: RequestSide, transfer: TransferRef | None) -> None:
        """Follows a transfer: the shell reports from now on how it fares."""
        if transfer is not None:
            request.transfers[side] = transfer
            self._of[transfer] = request, side

    # ---- how transfers fare

    def _failed(self, transfer: TransferRef, loss: Loss) -> None:
        """Takes the failure of a transfer; its blocks return later."""
        if (found := self._find(transfer)) is not None:
            request, side = found
            self.policy.failed(request.id, side, loss)
            self._tell_news(request)

    def _returned(self, transfer: TransferRef, *, received: int = 0) -> None:
        """Takes the return of a transfer's blocks: nothing uses them any more. `received`: tokens of the prompt whose
        KV is in them, with earlier ones.
        """
        found = self._find(transfer)
        self._of.pop(transfer, None)
        if found is not None:
            request, side = found
            if received and side is RequestSide.TAKE:
                self.policy.received(request.id, received)
            else:
                self.policy.returned(request.id, side)
            self._tell_news(request)

    def _find(self, transfer: TransferRef) -> tuple[Driven, RequestSide] | None:
        """Returns a transfer's request and side. None once the request is forgotten, even if another one has its id."""
        found = self._of.get(transfer)
        return found if found is not None and self._known.get(found[0].id) is found[0] else None

    def _tell_news(self, request: Driven) -> None:
        """Tells the scheduler the policy's news of a request, and forgets a request that is over."""
        for news in self.policy.take_told():
            self._tell(news)
        if request.id not in self.policy and self._known.pop(request.id, None) is not None:
            self._forgotten(request)
