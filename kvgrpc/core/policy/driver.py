"""The driver of a policy: hooks of a scheduler in, transfers and news out. All rules are the policy's.

A shell is a subclass that has the transfers: `kvgrpc.engine.scheduler.scheduler` on an engine's session,
`kvgrpc.service.scheduler` in the lead. The driver knows which transfer is which request's, and tells the shell what to
ask for; the shell reports how its transfers fare. Nothing here waits for a transfer.
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
    HandOver,
    Loss,
    Match,
    Mode,
    News,
    Outcome,
    Part,
    Reserve,
    Rules,
    Side,
    Start,
    Table,
    Task,
)
from kvgrpc.errors import KVGrpcError, NextStep

RENEW_S = 1.0
"""So often `renew_awaited` is called: in the firm time of a hand-over, also where a call gets lost."""
KEYS_MAX = 4_096
"""Keys of one call to a source."""

Spec = TypeVar("Spec", bound=RequestSpec[Any])
Name = TypeVar("Name")
Transfer = TypeVar("Transfer")


@dataclass(eq=False)
class DrivenRequest(Generic[Spec, Name, Transfer]):
    """A request with its transfers. Shells add what theirs need."""

    spec: Spec
    given: Name | None = None
    """What the KV that goes is named by; None until that is known."""
    transfers: dict[Side, Transfer] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.spec.request_id


Driven = TypeVar("Driven", bound=DrivenRequest[Any, Any, Any])


class Driver(ABC, Generic[Spec, Driven, Transfer]):
    """One engine's. Not for several threads at once. Its hooks are those of `Policy`."""

    def __init__(self, rules: Rules, tell: Callable[[News], None]) -> None:
        """`tell` gets what the scheduler is to know."""
        self._tell = tell
        self._make: dict[type[Task], Callable[[Driven, Any], Transfer | None]] = {
            Begin: self._begin,
            Reserve: self._reserve,
            HandOver: self._hand_over,
            Part: self._part,
            GiveUp: self._give_up,
        }
        self._begin_life(rules)

    def _begin_life(self, rules: Rules) -> None:
        """A life of the engine begins, in which no request is known."""
        self.policy = Policy(rules)
        self._known: dict[str, Driven] = {}
        self._of: dict[Transfer, tuple[Driven, Side]] = {}
        """Each transfer until nothing of it uses its blocks any more."""

    # ---- hooks of the scheduler

    def arrived(self, spec: Spec) -> Admitted:
        """Raises what `Policy.arrived`, `RequestSpec.arrival` `_let_in` and `_register` raise, and
        OutOfRange (CONTENT_RANGE) for a push whose parts have no name. Then nothing has changed.
        """
        arrival = spec.arrival(self.policy.rules)
        admitted = self.policy.admits(arrival)
        if spec.request_id not in self.policy:
            self._known[spec.request_id] = self._admit(spec, arrival)
        self.policy.arrived(arrival)
        self._perform_tasks(spec.request_id)
        return admitted

    def renew_awaited(self) -> bool:
        """The sources of pushes that may still come, or go on, are asked to keep them. Whether there are any."""
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
        """See `Policy.wanted`. Raises what `RequestSpec.first` raises, and then nothing has changed."""
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
        """`Policy.finished`. `first` as RequestSpec's, of prompt and answer; None: the prompt is all. Raises what it
        raises, and then nothing has changed.
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

    def _admit(self, spec: Spec, arrival: Arrival) -> Driven:
        request, give = self._let_in(spec, arrival), arrival.give
        if give is None or give.mode is not Mode.PUSH or not arrival.prompt_tokens:
            return request
        if give.prefill:  # its parts are named before they are all there
            request.given = spec.first(without_backoff(self.policy.rules, arrival.prompt_tokens))
        if spec.target:
            self._follow(request, Side.GIVE, self._register(request))
        return request

    # ---- what a shell does. What it cannot even ask for it raises as KVGrpcError: a loss like any other

    @abstractmethod
    def _let_in(self, spec: Spec, arrival: Arrival) -> Driven:
        """Raises KVGrpcError for a request that is not let in."""

    @abstractmethod
    def _register(self, request: Driven) -> Transfer:
        """Registers the push to the target that was brought."""

    @abstractmethod
    def _begin(self, request: Driven, task: Begin) -> Transfer: ...

    @abstractmethod
    def _reserve(self, request: Driven, task: Reserve) -> Transfer: ...

    @abstractmethod
    def _hand_over(self, request: Driven, task: HandOver) -> Transfer: ...

    @abstractmethod
    def _part(self, request: Driven, task: Part) -> Transfer: ...

    @abstractmethod
    def _give_up(self, request: Driven, task: GiveUp) -> Transfer | None:
        """None: there is nothing that could end."""

    @abstractmethod
    def _start(self, request: Driven, transfer: Transfer, task: Start) -> None: ...

    @abstractmethod
    def _start_over(self, request: Driven, transfer: Transfer) -> None: ...

    @abstractmethod
    def _end(self, request: Driven, transfer: Transfer, message: str) -> None:
        """Cancels a transfer; what comes of it is reported."""

    @abstractmethod
    def _renew(self, requests: list[Driven]) -> None:
        """Has the source of these, which they have in common, asked. What becomes of that is not waited for."""

    def _loss(self, error: KVGrpcError) -> Loss:
        return Loss(error.reason, error.sentence, NextStep.RECOMPUTE)

    def _forgotten(self, request: Driven) -> None:
        """Nothing of a request is kept any more."""

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
        """A task makes a transfer, or adds to one; or it is about one, and nothing once that is at rest."""
        side = Side.TAKE if isinstance(task, Begin | Start | Reserve) else Side.GIVE
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

    def _act(self, request: Driven, transfer: Transfer, task: Task) -> None:
        if isinstance(task, Start):
            self._start(request, transfer, task)
        elif isinstance(task, Cancel):
            self._end(request, transfer, task.message)
        else:
            self._start_over(request, transfer)

    def _lost(self, request: Driven, side: Side, loss: Loss) -> None:
        self.policy.failed(request.id, side, loss)
        transfer = request.transfers.get(side)
        if transfer in self._of:
            self._end(request, transfer, loss.message)
        else:
            self.policy.returned(request.id, side)
        self._tell_news(request)

    def _follow(self, request: Driven, side: Side, transfer: Transfer | None) -> None:
        """The shell reports from now on how a transfer fares."""
        if transfer is not None:
            request.transfers[side] = transfer
            self._of[transfer] = request, side

    # ---- how transfers fare

    def _failed(self, transfer: Transfer, loss: Loss) -> None:
        """It is over without success; its blocks return later."""
        if (found := self._find(transfer)) is not None:
            request, side = found
            self.policy.failed(request.id, side, loss)
            self._tell_news(request)

    def _returned(self, transfer: Transfer, *, received: int = 0) -> None:
        """Nothing of it uses its blocks any more. `received`: the KV of so many tokens of the prompt is in them, with
        what was there before.
        """
        found = self._find(transfer)
        self._of.pop(transfer, None)
        if found is not None:
            request, side = found
            if received and side is Side.TAKE:
                self.policy.received(request.id, received)
            else:
                self.policy.returned(request.id, side)
            self._tell_news(request)

    def _find(self, transfer: Transfer) -> tuple[Driven, Side] | None:
        """Whose transfer it is. None once that request is forgotten, also where another one has its id."""
        found = self._of.get(transfer)
        return found if found is not None and self._known.get(found[0].id) is found[0] else None

    def _tell_news(self, request: Driven) -> None:
        """Tells what the policy says of a request, and forgets one that is over."""
        for news in self.policy.take_told():
            self._tell(news)
        if request.id not in self.policy and self._known.pop(request.id, None) is not None:
            self._forgotten(request)
