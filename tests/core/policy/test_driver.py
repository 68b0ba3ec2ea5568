"""The driver of a policy with a shell whose transfers are numbers: calls that it makes, and news that it tells."""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core.policy.driver import KEYS_MAX, DrivenRequest, PolicyDriver
from kvgrpc.core.policy.spec import Offer, RequestSpec, Source
from kvgrpc.core.policy.values import (
    Arrival,
    Begin,
    Finished,
    Give,
    GiveUp,
    HandOverBlocks,
    HandOverPart,
    LoadEnded,
    Loss,
    ModeChoice,
    News,
    RequestSide,
    Reserve,
    Rules,
    SendEnded,
    Start,
    TakeLost,
    Task,
)
from kvgrpc.core.values.grants import AccessKind, Claims, mint, signing_key
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import AlreadyExists, InvalidRequest, KVGrpcError, NextStep, PreconditionFailed, Reason, Unavailable
from tests.core.policy.policies import ABORTED, COMPLETE, FREE, FULL, LOST, PULL, PUSH, TABLE, R

KEY = b"k" * 16
GONE = Unavailable(Reason.ENGINE_LOST, "no lead")
REFUSED = Loss(Reason.ENGINE_LOST, "no lead", NextStep.RECOMPUTE)


def token(access: AccessKind, tokens: int = 64) -> bytes:
    return mint(Claims(access, "p", 7, "127.0.0.1:1", "l-1", KEY, 30.0, 4, tokens), signing_key(b"s" * 32))


@dataclass(frozen=True)
class Spec(RequestSpec[str]):
    """A spec with a prompt of `prompt` tokens; a prompt of 33 tokens has no name."""

    prompt: int = 64

    @property
    def prompt_tokens(self) -> int:
        return self.prompt

    def first(self, tokens: int) -> str:
        if self.prompt == 33:
            raise InvalidRequest(Reason.CONTENT_RANGE, "no name")
        return f"prompt[:{tokens}]"


Request = DrivenRequest[Spec, str, int]
OFFER = Spec(R, take=Offer(token(AccessKind.READ)))
COMING = Spec(R, take=Source("p:1"), transfer_key=KEY)
PULLED = Spec(R, give=Give(PULL), transfer_key=KEY)
PUSHED = Spec(R, give=Give(PUSH), transfer_key=KEY)


class Shell(PolicyDriver[Spec, Request, int]):
    def __init__(self, **rules: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.news: list[News] = []
        self.refuses: type[Task] | None = None
        self.named: list[str | None] = []
        self._made = 0
        super().__init__(Rules((FULL,), **rules), self.news.append)

    def _let_in(self, spec: Spec, arrival: Arrival) -> Request:
        if spec.priority < 0:
            raise PreconditionFailed(Reason.NO_POOL, "not now")
        return DrivenRequest(spec)

    def _make_one(self, request: Request, task: Task) -> int:
        self.asked.append((type(task), request.given))
        if self.refuses is type(task):
            raise GONE
        self._made += 1
        return self._made

    _begin = _reserve = _hand_over = _make_one

    def _part(self, request: Request, task: HandOverPart) -> int:
        return request.transfers.get(RequestSide.GIVE) or self._make_one(request, task)

    def _register(self, request: Request) -> int:
        self.asked.append(("register", request.given))
        self._made += 1
        return self._made

    def _give_up(self, request: Request, task: GiveUp) -> int | None:
        self.asked.append((GiveUp, task.message))
        return request.transfers.get(RequestSide.GIVE)

    def _start(self, request: Request, transfer: int, task: Start) -> None:
        self.asked.append((Start, transfer))
        if self.refuses is Start:
            raise GONE

    def _start_over(self, request: Request, transfer: int) -> None:
        self.asked.append(("start over", transfer))

    def _end(self, request: Request, transfer: int, message: str) -> None:
        self.asked.append(("end", transfer, message))

    def _renew(self, requests: list[Request]) -> None:
        self.asked.append(("renew", requests[0].spec.source.address, [request.id for request in requests]))

    def take_asked(self) -> list[tuple[Any, ...]]:
        asked, self.asked = self.asked, []
        return asked

    def take_news(self) -> list[News]:
        news = self.news.copy()
        self.news.clear()
        return news

    failed, returned = PolicyDriver._failed, PolicyDriver._returned

    def finish(self, first: Any = None, *, computed: int = 64, outcome: Any = COMPLETE) -> Finished:
        return self._finish(R, first, TABLE, computed, outcome, 0)

    @property
    def at_rest(self) -> bool:
        return not (self._known or self._of or len(self.policy))


def taking(spec: Spec, **rules: Any) -> Shell:
    """Makes a shell that waits for KV."""
    shell = Shell(**rules)
    shell.arrived(spec)
    shell.allocated(R, TABLE, 0, shell.match(R, 0).tokens)
    return shell


def test_a_pull_begins_when_its_request_arrives_and_gets_its_blocks_when_they_are_there() -> None:
    shell = taking(OFFER)
    assert shell.take_asked() == [(Begin, None), (Start, 1)]
    shell.returned(1, received=64)
    assert shell.take_news() == [LoadEnded(R, 64, None, (), shell.policy.rules.on_loss)]
    assert shell.finish() == FREE
    assert shell.at_rest


def test_a_push_is_waited_for_in_blocks() -> None:
    shell = taking(COMING)
    assert shell.take_asked() == [(Reserve, None)]
    shell.failed(1, LOST)
    assert shell.take_news() == []
    shell.returned(1)
    (ended,) = shell.take_news()
    assert isinstance(ended, LoadEnded)
    assert ended.loss == LOST


def test_what_is_awaited_is_renewed_together_for_each_source_until_it_came_or_left() -> None:
    shell = Shell()
    for id_, address in (("a", "p:1"), ("b", "q:1"), ("c", "p:1"), ("d", "p:1"), ("e", "")):
        shell.arrived(replace(COMING, request_id=id_, take=Source(address)))
    shell.arrived(replace(OFFER, request_id="pulled"))
    shell.allocated("c", TABLE, 0, 64)
    shell.take_asked()
    assert shell.renew_awaited()
    assert shell.take_asked() == [("renew", "p:1", ["a", "c", "d"]), ("renew", "q:1", ["b"])]
    shell.aborted("a")
    shell.allocated("b", TABLE, 64, 0)
    shell.failed(2, LOST)
    shell.take_asked()
    assert shell.renew_awaited()
    assert shell.take_asked() == [("renew", "p:1", ["d"])]
    shell.abort_all("the cache was reset")
    assert ("end", 1, "the cache was reset") in shell.take_asked()
    assert not shell.renew_awaited()


def test_a_source_is_asked_for_no_more_keys_at_once_than_fit_into_a_call() -> None:
    shell = Shell()
    for number in range(KEYS_MAX + 1):
        shell.arrived(replace(COMING, request_id=str(number)))
    assert shell.renew_awaited()
    assert [len(requests) for _, _, requests in shell.take_asked()] == [KEYS_MAX, 1]


def test_a_staged_engine_says_when_it_has_copied_what_came() -> None:
    shell = taking(OFFER, staged=True)
    shell.returned(1, received=64)
    shell.take_news()
    shell.loaded(R)
    assert [type(news) for news in shell.take_news()] == [LoadEnded]


def test_what_is_handed_over_is_named_when_it_is_known_what_it_is() -> None:
    shell = Shell()
    shell.arrived(PULLED)
    assert shell.finish(lambda tokens: f"chat[:{tokens}]").handed_over
    assert shell.take_asked() == [(HandOverBlocks, "chat[:64]")]
    shell.returned(1)
    assert shell.take_news() == [SendEnded(R, None)]
    assert shell.at_rest


def test_the_prompt_is_all_where_nothing_else_was_said() -> None:
    shell = Shell()
    shell.arrived(PULLED)
    shell.finish()
    assert shell.take_asked() == [(HandOverBlocks, "prompt[:64]")]
    shell.finish(lambda tokens: pytest.fail("it has a name"))


def test_what_has_no_name_is_refused_and_nothing_has_changed() -> None:
    shell = Shell()
    shell.arrived(replace(PULLED, prompt=33))
    with pytest.raises(InvalidRequest):
        shell.finish(computed=33)
    assert shell.finish(lambda tokens: f"chat[:{tokens}]", computed=33).handed_over
    with pytest.raises(InvalidRequest):
        Shell().arrived(replace(PUSHED, prompt=33))


def test_a_push_is_named_when_it_arrives_and_its_parts_are_one_transfer() -> None:
    shell = Shell(backoff_tokens=1)
    shell.arrived(replace(PUSHED, prompt=65, needs_all_outputs=True))
    shell.computed(R, TABLE, 32, 0)
    shell.preempted(R)
    shell.computed(R, TABLE, 32, 1)
    assert shell.take_asked() == [(HandOverPart, "prompt[:64]"), ("start over", 1)]
    assert shell.finish().handed_over
    shell.returned(1)
    assert shell.at_rest


def test_a_prefill_for_which_a_destination_has_come_is_named_and_goes_by_parts() -> None:
    shell = Shell()
    assert not shell.wanted(R), "it has not arrived"
    shell.arrived(replace(PULLED, give=Give(ModeChoice.AUTO)))
    assert shell.wanted(R)
    assert shell.wanted(R)
    shell.computed(R, TABLE, 32, 1)
    assert shell.finish().handed_over
    assert shell.take_asked() == [(HandOverPart, "prompt[:64]")]
    shell.returned(1)
    assert shell.at_rest


def test_a_prefill_that_is_not_pushed_and_one_without_a_name_stay_what_they_are() -> None:
    shell = Shell()
    shell.arrived(PULLED)
    assert not shell.wanted(R)
    shell.arrived(replace(PULLED, request_id="r2", give=Give(ModeChoice.AUTO), prompt=33))
    with pytest.raises(InvalidRequest):
        shell.wanted("r2")
    assert not shell.policy.pushes("r2")


def test_a_target_that_was_brought_is_registered_when_its_request_arrives() -> None:
    shell, target = Shell(), token(AccessKind.WRITE)
    shell.arrived(replace(PUSHED, target=target))
    shell.arrived(replace(PUSHED, target=target))
    back = replace(PUSHED, request_id="r2", give=Give(PUSH, prefill=False), target=target)
    shell.arrived(back)
    shell.arrived(replace(PULLED, request_id="r3", target=target))
    assert shell.take_asked() == [("register", "prompt[:64]"), ("register", None)]
    shell.finish(outcome=ABORTED)
    assert shell.take_asked() == [(GiveUp, "its request did not finish")]


def test_a_destination_that_waits_for_a_push_that_did_not_begin_is_told() -> None:
    shell = Shell()
    shell.arrived(PUSHED)
    assert shell.finish(outcome=ABORTED) == FREE
    assert shell.take_asked() == [(GiveUp, "its request did not finish")]
    assert shell.at_rest


def test_what_is_not_wanted_any_more_is_cancelled_until_it_is_at_rest() -> None:
    shell = taking(OFFER)
    shell.take_asked()
    assert shell.aborted(R, "enough").keep
    assert shell.take_asked() == [("end", 1, "enough")]
    shell.returned(1)
    assert shell.at_rest
    shell = Shell()
    shell.arrived(PULLED)
    shell.finish()
    shell.failed(1, LOST)
    shell.aborted(R)
    shell.returned(1)
    assert shell.take_news() == [SendEnded(R, LOST)]


@pytest.mark.parametrize(("spec", "kind"), [(OFFER, Begin), (COMING, Reserve)])
def test_what_cannot_be_asked_for_is_a_loss(spec: Spec, kind: type[Task]) -> None:
    shell = Shell()
    shell.refuses = kind
    shell.arrived(spec)
    shell.allocated(R, TABLE, 0, shell.match(R, 0).tokens)
    news = shell.take_news()[-1]
    assert isinstance(news, LoadEnded | TakeLost)
    assert news.loss == REFUSED
    assert shell.take_asked() == [(kind, None)]


@pytest.mark.parametrize("refused", [None, Begin])
def test_what_cannot_be_used_is_let_go_if_it_could_be_asked_for(refused: type[Task] | None) -> None:
    shell = Shell()
    shell.refuses = refused
    shell.arrived(replace(OFFER, needs_all_outputs=True))
    assert shell.take_asked() == [(Begin, None), *([(Start, 1)] if refused is None else [])]


def test_what_cannot_be_asked_of_a_transfer_ends_it() -> None:
    shell = Shell()
    shell.arrived(OFFER)
    shell.refuses = Start
    shell.allocated(R, TABLE, 0, 64)
    assert shell.take_asked()[-1] == ("end", 1, "no lead")
    shell.returned(1)
    assert [news.loss for news in shell.take_news() if isinstance(news, LoadEnded)] == [REFUSED]


def test_a_request_that_is_not_let_in_is_not_known() -> None:
    shell, error = Shell(), PreconditionFailed
    with pytest.raises(error):
        shell.arrived(replace(OFFER, priority=-1))
    assert shell.at_rest
    shell.arrived(OFFER)
    with pytest.raises(AlreadyExists):
        shell.arrived(COMING)


def test_the_end_of_a_transfer_is_not_that_of_a_later_request_of_the_same_id() -> None:
    shell = Shell()
    shell.arrived(OFFER)
    assert shell.aborted(R) == FREE
    shell.arrived(OFFER)
    shell.failed(1, LOST)
    shell.returned(1)
    shell.returned(1)
    assert shell.take_news() == []
    assert shell.match(R, 0).tokens == 64


def test_hooks_of_a_request_that_is_not_known_ask_for_nothing() -> None:
    shell = Shell()
    shell.allocated("x", TABLE, 0, 0)
    shell.computed("x", TABLE, 0, 0)
    shell.preempted("x")
    shell.loaded("x")
    assert (shell.aborted("x"), shell.finish()) == (FREE, FREE)
    assert shell.take_asked() == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(OFFER, take=Offer(b"nonsense")), Reason.GRANT_INVALID),
        (replace(OFFER, take=Offer(token(AccessKind.WRITE))), Reason.GRANT_WRONG_ACCESS),
        (replace(PUSHED, target=token(AccessKind.READ)), Reason.GRANT_WRONG_ACCESS),
        (replace(PUSHED, transfer_key=b"short"), Reason.INVALID_FIELD),
        (replace(COMING, transfer_key=b""), Reason.INVALID_FIELD),
    ],
)
def test_a_spec_whose_transfers_cannot_be_is_refused(spec: Spec, reason: Reason) -> None:
    with pytest.raises(KVGrpcError) as caught:
        spec.arrival(Rules((FULL,)))
    assert caught.value.reason is reason


def test_a_spec_says_what_it_takes() -> None:
    assert (OFFER.offer.grant, COMING.source.address) == (token(AccessKind.READ), "p:1")
    assert not OFFER.whole_units
    assert replace(OFFER, traceparent="a") == OFFER


@pytest.mark.parametrize(
    ("give", "stated_s", "kept_s"),
    [
        (Give(PULL), None, None),
        (Give(PULL), 2.0, 2.0),
        (Give(PULL, prefill=False), None, 0.0),
        (Give(PULL, prefill=False), 2.0, 2.0),
        (None, None, None),
    ],
)
def test_an_offer_for_the_next_turn_is_soft_unless_it_says_otherwise(
    give: Give | None, stated_s: float | None, kept_s: float | None
) -> None:
    assert Spec(R, give=give, firm_ttl_s=stated_s).kept_s == kept_s
