"""A scheduler without an engine: it calls SchedulerService of a server, like one in another language would."""

import secrets
from collections.abc import Sequence
from typing import Any

from kvgrpc.v1 import common_pb2, scheduler_pb2
from tests.service.engines import WAIT_S, Engine
from tests.service.values import content, dur, new_key, prompt

PROMPT = prompt(40)
COMPLETE, ABORTED = scheduler_pb2.REQUEST_OUTCOME_COMPLETE, scheduler_pb2.REQUEST_OUTCOME_ABORTED
PULL, PUSH = common_pb2.TRANSFER_MODE_PULL, common_pb2.TRANSFER_MODE_PUSH


def new_id() -> str:
    """Returns a request id that no other test knows, because all tests share the servers."""
    return f"r-{secrets.token_hex(6)}"


def intent(**fields: Any) -> common_pb2.Intent:
    return common_pb2.Intent(**{"transfer_key": new_key(), **fields})


class Scheduler:
    """A scheduler of one server. It gets its news once, in order."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stub = engine.api.scheduler
        self.seq = 0
        self._news: list[scheduler_pb2.SchedulerNews] = []
        while self.poll():  # skips news of other tests
            pass
        self._news.clear()

    def poll(self, wait_s: float = 0.0) -> list[scheduler_pb2.SchedulerNews]:
        """Polls for news and returns them. The poll acknowledges earlier news."""
        request = scheduler_pb2.PollSchedulerNewsRequest(after_seq=self.seq, wait=dur(wait_s))
        found = list(self.stub.PollSchedulerNews(request).news)
        self.seq = found[-1].seq if found else self.seq
        self._news += found
        return found

    def told(self, kind: str, id_: str) -> Any:
        """Waits for the next news of a kind about a request and removes it. Other news stay."""
        while True:
            for news in self._news:
                if news.request_id == id_ and news.WhichOneof("news") == kind:
                    self._news.remove(news)
                    return getattr(news, kind)
            assert self.poll(WAIT_S), f"no {kind} of {id_} came; there is {self._news}"

    # -- calls

    def arrived(
        self, id_: str, token_ids: Sequence[int] | None = PROMPT, **fields: Any
    ) -> scheduler_pb2.RequestArrivedResponse:
        return self.stub.RequestArrived(arrived(id_, token_ids, **fields))

    def match(self, id_: str, computed: int = 0) -> int:
        return self.stub.MatchTokens(
            scheduler_pb2.MatchTokensRequest(request_id=id_, computed_tokens=computed)
        ).external_tokens

    def allocated(self, id_: str, blocks: Sequence[int], computed: int = 0, **fields: Any) -> int:
        """Allocates blocks for all matching tokens, unless `external_tokens` is given. Returns the number of tokens."""
        usual = {
            "external_tokens": self.match(id_, computed),
            "computed_tokens": computed,
            "blocks": self.engine.blocks(blocks),
        }
        request = scheduler_pb2.BlocksAllocatedRequest(request_id=id_, **{**usual, **fields})
        self.stub.BlocksAllocated(request)
        return request.external_tokens

    def computed(self, id_: str, blocks: Sequence[int], tokens: int) -> None:
        self.stub.TokensComputed(
            scheduler_pb2.TokensComputedRequest(
                request_id=id_, blocks=self.engine.blocks(blocks), computed_tokens=tokens
            )
        )

    def preempted(self, id_: str) -> None:
        self.stub.RequestPreempted(scheduler_pb2.RequestPreemptedRequest(request_id=id_))

    def loaded(self, id_: str) -> None:
        self.stub.BlocksLoaded(scheduler_pb2.BlocksLoadedRequest(request_id=id_))

    def finished(
        self, id_: str, blocks: Sequence[int], computed: int = 40, **fields: Any
    ) -> scheduler_pb2.RequestFinishedResponse:
        return self.stub.RequestFinished(finished(self.engine, id_, blocks, computed, **fields))

    def aborted(self, id_: str, message: str = "") -> bool:
        """Aborts a request. Returns whether its blocks must be kept."""
        return self.stub.AbortRequest(scheduler_pb2.AbortRequestRequest(request_id=id_, message=message)).keep

    def prefilled(self, id_: str, blocks: Sequence[int], **fields: Any) -> common_pb2.Grant:
        """Computes a prompt and hands it over."""
        self.arrived(id_, **{"give": scheduler_pb2.KvGift(), "intent": intent(), **fields})
        reply = self.finished(id_, blocks)
        assert reply.keep
        assert reply.handed_over
        return reply.grant


def arrived(id_: str, token_ids: Sequence[int] | None = PROMPT, **fields: Any) -> scheduler_pb2.RequestArrivedRequest:
    """Returns a RequestArrived. With None as token ids it has no prompt."""
    named = {} if token_ids is None else {"prompt": content(token_ids)}
    return scheduler_pb2.RequestArrivedRequest(request_id=id_, **{**named, **fields})


def finished(
    engine: Engine, id_: str, blocks: Sequence[int], computed: int = 40, **fields: Any
) -> scheduler_pb2.RequestFinishedRequest:
    usual = {"blocks": engine.blocks(blocks), "computed_tokens": computed, "outcome": COMPLETE}
    return scheduler_pb2.RequestFinishedRequest(request_id=id_, **{**usual, **fields})


def reason(failure: common_pb2.Failure) -> str:
    """Returns the reason of a failure, as errors of calls name it."""
    return common_pb2.FailureReason.Name(failure.reason).removeprefix("FAILURE_REASON_")
