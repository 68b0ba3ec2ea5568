"""The client of SchedulerService: requests, replies, and a request that moves from server to server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from kvgrpc.client import Client, block_ids, block_runs, connect, connect_sync, content, refusal, step_calls
from kvgrpc.errors import Aborted, InternalError, InvalidRequest, Reason
from kvgrpc.v1.common_pb2 import (
    FAILURE_REASON_BLOCK_COUNT_MISMATCH,
    TRANSFER_MODE_PUSH,
    Blocks,
    Grant,
    GroupBlocks,
    Intent,
    PeerAddress,
)
from kvgrpc.v1.pool_pb2 import AllocateBlocksResponse
from kvgrpc.v1.scheduler_pb2 import (
    REQUEST_OUTCOME_ABORTED,
    REQUEST_OUTCOME_COMPLETE,
    KvGift,
    MatchTokensResponse,
    PollSchedulerNewsResponse,
    PushOffer,
    RequestArrivedResponse,
    ScheduleAnswer,
)
from kvgrpc.v1.transfer_pb2 import GetTransferRequest
from tests.client.fake import FakeServer
from tests.client.serving import served
from tests.client.streams.stepping import LIFE, SAID, R, answering, failing_stream, news_from

TOKENS = list(range(64))


def last(server: FakeServer) -> Any:
    return server.seen[-1].request


# ---- requests that are sent


async def test_a_request_says_what_it_takes_and_gives(server: FakeServer, client: Client) -> None:
    scheduler = client.scheduler()
    grant = Grant(token=b"t")
    await scheduler.request_arrived(R, TOKENS, take=grant, intent=Intent(priority=2), needs_all_outputs=True)
    assert last(server).prompt == content(TOKENS)
    assert (last(server).offer, last(server).intent.priority, last(server).needs_all_outputs) == (grant, 2, True)
    assert not last(server).HasField("give")
    push = PushOffer(source=PeerAddress(address="p:1"))
    await scheduler.request_arrived(R, take=push, give=KvGift(decodes=True), target=grant)
    assert last(server).WhichOneof("take") == "push"
    assert (last(server).push, last(server).give.decodes, last(server).target) == (push, True, grant)
    assert not last(server).HasField("prompt")


async def test_blocks_are_listed_as_everywhere(server: FakeServer, client: Client) -> None:
    scheduler = client.scheduler()
    await scheduler.blocks_allocated(R, [5, 6], computed_tokens=16, external_tokens=48, after_step=3)
    said = last(server)
    assert block_ids(said.blocks) == [5, 6]
    assert (said.computed_tokens, said.external_tokens, said.after_step) == (16, 48, 3)
    await scheduler.tokens_computed(R, {0: [5], 1: [7]}, 32, step=4, dropped_blocks=[0, 2])
    assert [(row.group, block_ids(row)) for row in last(server).blocks.groups] == [(0, [5]), (1, [7])]
    assert (last(server).computed_tokens, last(server).step, list(last(server).dropped_block_counts)) == (
        32,
        4,
        [0, 2],
    )
    await scheduler.request_finished(R, [5], 64, content=TOKENS)
    assert (last(server).outcome, last(server).content) == (REQUEST_OUTCOME_COMPLETE, content(TOKENS))
    await scheduler.request_finished(R, [5], 64, REQUEST_OUTCOME_ABORTED)
    assert (last(server).outcome, last(server).HasField("content")) == (REQUEST_OUTCOME_ABORTED, False)
    with pytest.raises(ValueError, match="no_such"):
        await scheduler.tokens_computed(R, [5], 32, no_such=1)  # type: ignore[call-arg]


async def test_requests_and_blocks_are_of_the_life_in_the_first_reply(server: FakeServer, client: Client) -> None:
    server.answers["RequestArrived"] = lambda *_: RequestArrivedResponse(header=LIFE)
    scheduler = client.scheduler()
    await scheduler.request_arrived(R)
    assert (last(server).incarnation, scheduler.incarnation) == (0, 7)
    await scheduler.blocks_allocated(R, [5])
    assert last(server).blocks.incarnation == 7
    taken = Blocks(incarnation=8, allocation_id="a", groups=[GroupBlocks(runs=block_runs([5]))])
    await scheduler.blocks_allocated(R, AllocateBlocksResponse(blocks=taken))
    assert last(server).blocks == taken
    await scheduler.tokens_computed(R, [5], 16, incarnation=9)
    assert last(server).blocks.incarnation == 9
    server.answers["Schedule"] = answering()
    await scheduler.step([step_calls.tokens_computed(R, [5], 16), step_calls.tokens_computed(R, taken, 16)])
    assert SAID[-1].incarnation == 7
    assert [call.tokens_computed.blocks.incarnation for call in SAID[-1].calls] == [7, 8]
    scheduler.start_over()
    await scheduler.poll()
    assert (last(server).incarnation, last(server).after_seq) == (0, 0)


async def test_a_step_has_its_calls_in_their_order(server: FakeServer, client: Client) -> None:
    calls: list[step_calls.StepCall] = [
        step_calls.request_arrived(R),
        step_calls.match_tokens(R, 16),
        step_calls.blocks_allocated(R, [5]),
        step_calls.tokens_computed(R, [5], 16),
        step_calls.blocks_loaded(R),
        step_calls.request_preempted(R),
        step_calls.request_finished(R, [5], 16, REQUEST_OUTCOME_COMPLETE),
        step_calls.abort_request(R, "why"),
        step_calls.blocks_needed({1: 2}, request_time_us=3),
    ]
    server.answers["Schedule"] = answering()
    await client.scheduler().step(calls)
    made = SAID[-1].calls
    assert [call.WhichOneof("call") for call in made] == [
        "request_arrived", "match_tokens", "blocks_allocated", "tokens_computed", "blocks_loaded",
        "request_preempted", "request_finished", "abort_request", "blocks_needed",
    ]  # fmt: skip
    assert [getattr(call, call.WhichOneof("call") or "") for call in made] == calls
    with pytest.raises(TypeError, match="GetTransferRequest"):
        await client.scheduler().step([GetTransferRequest()])  # type: ignore[list-item]


# ---- replies that are received


async def test_news_are_acknowledged_by_the_next_question(server: FakeServer, client: Client) -> None:
    scheduler = client.scheduler()
    server.answers["PollSchedulerNews"] = lambda *_: PollSchedulerNewsResponse(header=LIFE, news=news_from(3, 2))
    assert [row.seq for row in await scheduler.poll(1.5)] == [3, 4]
    assert (last(server).after_seq, last(server).wait.ToMilliseconds()) == (0, 1500)
    server.answers["Schedule"] = failing_stream(grpc.StatusCode.ABORTED, "INCARNATION_CHANGED")
    with pytest.raises(Aborted):
        await scheduler.step()
    server.answers["Schedule"] = answering(*news_from(5, 1))
    assert [row.seq for row in (await scheduler.step()).news] == [5]
    assert [said.after_seq for said in SAID] == [4], "what failed acknowledged nothing"
    server.answers["PollSchedulerNews"] = lambda *_: PollSchedulerNewsResponse()
    for _ in range(2):
        assert not await scheduler.poll()
        assert last(server).after_seq == 5


async def test_who_waits_for_news_has_the_time_for_an_answer_on_top(server: FakeServer, client: Client) -> None:
    await client.scheduler().poll(30.0)
    left = server.seen[-1].time_s
    assert left is not None
    assert 30.0 < left < 41.0  # gRPC rounds a deadline of this length up, to a tenth of a second
    await client.scheduler().poll(30.0, timeout_s=5.0)
    assert (server.seen[-1].time_s or 99.0) < 30.0


def test_a_refusal_within_a_step_is_the_error_of_the_call() -> None:
    answer = ScheduleAnswer(status_code=3)
    answer.failure.reason, answer.failure.message = FAILURE_REASON_BLOCK_COUNT_MISMATCH, "3 blocks"
    error = refusal(answer)
    assert isinstance(error, InvalidRequest)
    assert (error.reason, error.message) == (Reason.BLOCK_COUNT_MISMATCH, "3 blocks")
    answer.status_code = 99
    assert isinstance(refusal(answer), InternalError)
    assert refusal(ScheduleAnswer(match_tokens=MatchTokensResponse(external_tokens=3))) is None


# ---- with real servers


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    with served("--engine-id", "P", "--read-blocks") as source, served("--engine-id", "D", "--read-blocks") as other:
        yield source.address, other.address


@pytest.fixture
async def pair(addresses: tuple[str, str]) -> AsyncIterator[tuple[Client, Client]]:
    async with connect(addresses[0]) as source, connect(addresses[1]) as destination:
        yield source, destination


async def test_a_request_goes_from_server_to_server_by_pull_and_by_push(pair: tuple[Client, Client]) -> None:
    p, d = (client.scheduler() for client in pair)
    address = (await pair[0].capabilities()).engine.address
    for mode in ("pull", "push"):
        id_, key = f"{R}-{mode}", mode.encode() * 4
        taken, target = await pair[0].allocate(4), await pair[1].allocate(4)
        intent = Intent(transfer_key=key)
        if mode == "push":
            push = PushOffer(source=PeerAddress(address=address))
            await d.request_arrived(id_, TOKENS, take=push, intent=intent)
            await d.blocks_allocated(id_, target, external_tokens=64)
            intent.mode = TRANSFER_MODE_PUSH
        await p.request_arrived(id_, TOKENS, give=KvGift(), intent=intent)
        finished = await p.request_finished(id_, taken, 64)
        assert finished.keep
        assert finished.handed_over
        if mode == "pull":
            await d.request_arrived(id_, TOKENS, take=finished.grant)
            found = await d.match_tokens(id_)
            await d.blocks_allocated(id_, target, external_tokens=found.external_tokens)
        (ended,) = await d.poll(30.0)
        assert (ended.request_id, ended.load_ended.computed_tokens, ended.load_ended.HasField("failure")) == (
            id_,
            64,
            False,
        )
        (sent,) = await p.poll(30.0)
        assert sent.WhichOneof("news") == "send_ended"
        for client, blocks in zip(pair, (taken, target), strict=True):
            await client.free(blocks)


async def test_a_bad_call_of_a_step_is_refused_alone(pair: tuple[Client, Client]) -> None:
    scheduler = pair[1].scheduler()
    while await scheduler.poll():
        pass
    grants = KvGift()
    reply = await scheduler.step(
        [
            step_calls.request_arrived("s1", TOKENS, give=grants),
            step_calls.request_arrived("s2", TOKENS, give=grants, intent=Intent(transfer_key=b"k" * 16)),
            step_calls.match_tokens("s2"),
            step_calls.abort_request("s2"),
        ]
    )
    refusals = [refusal(answer) for answer in reply.answers]
    assert isinstance(refusals[0], InvalidRequest)
    assert refusals[1:] == [None] * 3
    with pytest.raises(Aborted) as caught:
        await scheduler.tokens_computed("s3", [0], 16, incarnation=1)
    assert caught.value.reason is Reason.INCARNATION_CHANGED


async def test_a_request_goes_from_server_to_server_by_steps(pair: tuple[Client, Client]) -> None:
    p, d = (client.scheduler() for client in pair)
    taken, target = await pair[0].allocate(4), await pair[1].allocate(4)
    for scheduler in (p, d):
        while (await scheduler.step()).news:  # skips news of other tests
            pass
    prefilled = await p.step(
        [
            step_calls.request_arrived("s9", TOKENS, give=KvGift(), intent=Intent(transfer_key=b"s" * 16)),
            step_calls.request_finished("s9", taken, 64),
        ]
    )
    grant = prefilled.answers[1].request_finished.grant
    reply = await d.step(
        [
            step_calls.request_arrived("s9", TOKENS, take=grant),
            step_calls.match_tokens("s9"),
            step_calls.blocks_allocated("s9", target, external_tokens=64),
        ]
    )
    assert [refusal(answer) for answer in reply.answers] == [None] * 3
    assert reply.answers[1].match_tokens.external_tokens == 64
    news = list(reply.news) or list(await d.poll(30.0))
    assert [(row.request_id, row.load_ended.computed_tokens) for row in news] == [("s9", 64)]
    assert not (await d.step()).news, "the number that was heard last is one for stream and calls"
    sent = await p.poll(30.0)
    assert [row.WhichOneof("news") for row in sent] == ["send_ended"]
    await p.step()
    for client, blocks in zip(pair, (taken, target), strict=True):
        await client.free(blocks)


async def test_without_an_event_loop_it_is_the_same(addresses: tuple[str, str]) -> None:
    def work() -> None:
        with connect_sync(addresses[1]) as client:
            scheduler = client.scheduler()
            while scheduler.poll():
                pass
            scheduler.request_arrived("t1", give=KvGift(), intent=Intent(transfer_key=b"k" * 16))
            assert scheduler.incarnation
            assert scheduler.match_tokens("t1").external_tokens == 0
            assert scheduler.step([step_calls.match_tokens("t1")]).answers[0].match_tokens.external_tokens == 0
            assert not scheduler.step(timeout_s=5.0).answers
            assert not scheduler.abort_request("t1").keep
            scheduler.start_over()
            assert not scheduler.incarnation

    await asyncio.to_thread(work)
