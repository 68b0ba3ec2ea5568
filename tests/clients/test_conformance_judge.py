"""The runner fails each client or server whose fault a case is meant to find. Made-up answers play the faults."""

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from clients.conformance.kvgrpc_conformance import cases
from clients.conformance.kvgrpc_conformance.cases import Case
from clients.conformance.kvgrpc_conformance.executor import Executor
from clients.conformance.kvgrpc_conformance.play import Failure, Player
from clients.conformance.kvgrpc_conformance.stage import Stage
from clients.python.conformance_ops import Ops
from kvgrpc.errors import DeadlineExceeded
from kvgrpc.v1.transfer_pb2 import Transfer, WaitTransferResponse
from tests.client.fake import FakeServer, failing

Json = dict[str, Any]
SUITE = {case.name: case for case in cases.load()}


class Answers:
    """An executor and its servers. Each method or op gives its next answer; the last answer repeats forever."""

    def __init__(self, **answers: list[Json]) -> None:
        self._answers = answers

    async def ask(self, request: Json, _: float) -> Json:
        name = request["method"].rpartition("/")[2] if request["op"] == "call" else request["op"]
        rows = self._answers.get(name, [{}])
        answer = rows.pop(0) if len(rows) > 1 else rows[0]
        return answer if "error" in answer else {"ok": {"reply": answer} if request["op"] == "call" else answer}

    async def act(self, step: dict[str, str]) -> Json:
        (name,) = step
        return {"ok": self._answers.get(name, [{}])[0]}

    def clients(self) -> dict[str, str]:
        return {}

    def is_real(self, name: str) -> bool:
        return False

    def settings(self, name: str) -> Json:
        return {}

    def variables(self) -> Json:
        return {"address": {}, "clients": {}}


async def played(case: Case, **answers: list[Json]) -> Failure | None:
    made = Answers(**answers)
    return await Player(case, cast("Stage", made), cast("Executor", made)).play()


def a_case(step: Json) -> Case:
    watch = {"open": "TransferService/WatchTransfers", "server": "P", "stream": "w"}
    return Case("made up", "A rule.", "area", [watch, step])


DEFAULTS = {"message": {"transfer": {"$unset": True}, "historyLost": False}}


@pytest.mark.parametrize("answer", [{"timeout": True}, {"end": True}])
@pytest.mark.parametrize("expected", [{}, {"expect": DEFAULTS}], ids=["nothing", "defaults"])
async def test_a_stream_that_tells_nothing_is_no_message_of_defaults(answer: Json, expected: Json) -> None:
    failure = await played(a_case({"next": "w", **expected}), next=[answer])
    assert failure is not None
    assert "there is no message" in str(failure)


@pytest.mark.parametrize(
    ("expected", "answer"),
    [(DEFAULTS, {"message": {}}), ({"timeout": True}, {"timeout": True}), ({"end": True}, {"end": True})],
    ids=["message", "timeout", "end"],
)
async def test_what_a_next_names_may_come(expected: Json, answer: Json) -> None:
    assert await played(a_case({"next": "w", "expect": expected}), next=[answer]) is None


@pytest.mark.parametrize(("keys", "passes"), [("abm", True), ("aam", False)])
async def test_a_client_that_gives_one_key_to_two_calls_fails(keys: str, passes: bool) -> None:
    made = {"a": "a" * 16, "b": "b" * 16, "m": "mine"}
    calls = [{"request": {"idempotencyKey": made[key]}} for key in keys]
    failure = await played(SUITE["keys of the client"], seen=[{"calls": calls}])
    assert (failure is None) is passes


REUSED = {"error": {"code": "ALREADY_EXISTS", "reason": "IDEMPOTENCY_KEY_REUSED"}}


@pytest.mark.parametrize(("repeated_seq", "passes"), [("2", True), ("3", False)], ids=["kept", "done again"])
async def test_a_server_that_does_a_release_again_fails(repeated_seq: str, passes: bool) -> None:
    failure = await played(
        SUITE["free and release repeated"],
        FinishedBlocks=[{"lease": {"leaseId": "l-1"}}, {"lease": {"leaseId": "l-2"}}],
        ReleaseLease=[
            {"header": {"eventSeq": "2"}, "lease": {"state": "LEASE_STATE_RELEASED"}},
            {"header": {"eventSeq": repeated_seq}, "lease": {"state": "LEASE_STATE_RELEASED"}},
            REUSED,
        ],
        GetLease=[{"header": {"eventSeq": "3"}}],
        FreeBlocks=[{"freedBlocks": {"groups": [{"runs": {"counts": [3]}}]}}],
    )
    assert (failure is None) is passes, failure


CANCELLED: Json = {"transferId": "t-1", "state": "TRANSFER_STATE_CANCELLED", "eventSeq": "3"}
PENDING: Json = {"transferId": "t-2", "state": "TRANSFER_STATE_PENDING", "eventSeq": "2"}
BEFORE: Json = {**CANCELLED, "state": "TRANSFER_STATE_PENDING", "eventSeq": "1"}


@pytest.mark.parametrize(
    ("told", "passes"),
    [(CANCELLED, True), (PENDING, False), (BEFORE, False)],
    ids=["the cancel", "what was told before", "what was before the watch"],
)
async def test_a_watch_that_tells_something_else_after_a_cut_fails(told: Json, passes: bool) -> None:
    silence = {"timeout": True}
    offers = [{"transfer": {"transferId": name}, "header": {"eventSeq": "1"}} for name in ("t-1", "t-2", "t-3")]
    failure = await played(
        SUITE["watch over a cut"],
        FinishedBlocks=offers,
        GetTransfer=[{"transfer": CANCELLED if told["transferId"] == "t-1" else PENDING}],
        next=[
            {"message": {"transfer": PENDING}},
            silence,
            {"message": {}},  # no transfer: the server reports its position
            {"message": {"transfer": told}},
            silence,
            {"message": {"transfer": {"transferId": "t-3"}}},
        ],
    )
    assert (failure is None) is passes, failure


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    await fake.start()
    yield fake
    await fake.stop()


async def test_only_the_end_of_a_wait_is_a_condition_that_is_not_met(server: FakeServer) -> None:
    ops = Ops()
    await ops.op_connect({"server": "P", "address": server.address})
    asked = {"server": "P", "transferId": "t-1", "timeoutS": 0.2}
    try:
        server.answers["WaitTransfer"] = lambda *_: WaitTransferResponse(transfer=Transfer(transfer_id="t-1"))
        assert (await ops.op_wait(asked))["conditionMet"] is False
        server.answers["WaitTransfer"] = failing(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
        with pytest.raises(DeadlineExceeded):
            await ops.op_wait(asked)
    finally:
        await ops.close_all()
