"""Registrations with invalid grants: the source refuses those that it can detect, and the issuer fails the others.

In every case no block is lost, and no byte of the destination is touched.
"""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, transfer_pb2
from tests.service.api import refused, without
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import (
    CANCELLED,
    FAILED,
    RETURNED,
    SUCCEEDED,
    Engine,
    memory_unchanged,
    unchanged,
    wait_until,
)
from tests.service.hostile.forged_grants import forge
from tests.service.pushes import check_a_good_push, fail, finish, reason_of, register, reserve, wait_active
from tests.service.values import content, dur, new_key, prompt

TOKENS = prompt(40)
LAST_STEP = 2**53 - 1


# ---- what the source can detect by itself


def test_what_is_no_grant_registers_nothing(source: Engine, destination: Engine) -> None:
    good = reserve(destination, new_key(), TOKENS, destination.allocate(3)).grant
    with unchanged(source, destination), refused(source.api, "INVALID_ARGUMENT", "GRANT_INVALID"):
        register(source, common_pb2.Grant(token=good.token[:-1]))


def test_a_registration_states_a_grant_and_a_label_of_some_length(source: Engine, destination: Engine) -> None:
    good = reserve(destination, new_key(), TOKENS, destination.allocate(3)).grant
    with unchanged(source, destination):
        with refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
            register(source, good, request_id="r" * 257)
        refusal = source.api.refusal(lambda: source.api.handoff.RegisterPush(handoff_pb2.RegisterPushRequest()))
    assert refusal.reason in {"INVALID_FIELD", "GRANT_INVALID"}


def test_a_read_grant_registers_nothing_and_a_write_grant_reads_nothing(source: Engine, destination: Engine) -> None:
    key, mine = new_key(), destination.allocate(3)
    read = source.hand_over(TOKENS).grant
    write = reserve(destination, key, TOKENS, mine).grant
    assert (read.access, write.access) == (common_pb2.ACCESS_KIND_READ, common_pb2.ACCESS_KIND_WRITE)
    blocks = source.allocate(3)
    ref = lease_pb2.LeaseRef(grant=write)
    with unchanged(source, destination):
        for engine in (source, destination):
            with refused(engine.api, "FAILED_PRECONDITION", "GRANT_WRONG_ACCESS"):
                register(engine, read)
        with refused(source.api, "FAILED_PRECONDITION", "GRANT_WRONG_ACCESS"):
            source.pull(write, TOKENS, blocks)
        for call in (
            lambda: destination.api.leases.GetLease(lease_pb2.GetLeaseRequest(lease=ref)),
            lambda: destination.api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=ref)),
        ):
            assert destination.api.refusal(call).reason in {"GRANT_WRONG_ACCESS", "LEASE_NOT_FOUND"}
        (row,) = destination.api.leases.RenewLeases(lease_pb2.RenewLeasesRequest(leases=[ref])).leases
        assert row.reason != common_pb2.FAILURE_REASON_UNSPECIFIED
    register(source, write)
    sent = finish(source, key, TOKENS, blocks)
    assert source.wait(sent.transfer.transfer_id).state == SUCCEEDED


def test_a_grant_with_an_address_off_the_list_is_refused(source: Engine, destination: Engine) -> None:
    grant = reserve(destination, new_key(), TOKENS, destination.allocate(3)).grant
    grant = forge(grant, address="169.254.169.254:80")
    with unchanged(source, destination), refused(source.api, "PERMISSION_DENIED", "DIAL_REFUSED"):
        register(source, grant)


def test_a_push_that_declared_no_other_has_one_destination(source: Engine, destination: Engine) -> None:
    key, blocks = new_key(), source.allocate(3)
    mine = reserve(destination, key, TOKENS, destination.allocate(3)).grant
    other = forge(mine, lease_id="another target")
    finish(source, key, TOKENS, blocks, last=False, after_step=LAST_STEP)
    wait_active(source, register(source, mine).transfer.transfer_id)
    with unchanged(source, destination):
        register(source, mine)  # a repeated registration is the same registration
        with refused(source.api, "ALREADY_EXISTS", "TRANSFER_EXISTS"):
            register(source, other)


def test_blocks_for_readers_are_not_pushed(source: Engine, destination: Engine) -> None:
    key, blocks = new_key(), source.allocate(3)
    handed = source.hand_over(TOKENS, blocks, transfer_key=key)
    grant = reserve(destination, key, TOKENS, destination.allocate(3)).grant
    with unchanged(source, destination):
        with refused(source.api, "FAILED_PRECONDITION", "WAITS_FOR_MISMATCH"):
            register(source, grant)
        with refused(source.api, "FAILED_PRECONDITION", "WAITS_FOR_MISMATCH"):
            finish(source, key, TOKENS, blocks)
    pulled = destination.pull(handed.grant, TOKENS, destination.allocate(3))
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED


def test_blocks_for_a_registration_are_not_handed_to_readers(source: Engine, destination: Engine) -> None:
    key, blocks = new_key(), source.allocate(3)
    reserved = reserve(destination, key, TOKENS, destination.allocate(3))
    register(source, reserved.grant)
    with unchanged(source, destination), refused(source.api, "FAILED_PRECONDITION", "WAITS_FOR_MISMATCH"):
        source.hand_over(TOKENS, blocks, transfer_key=key)
    finish(source, key, TOKENS, blocks)
    assert destination.wait(reserved.transfer.transfer_id).state == SUCCEEDED


def test_a_push_cancelled_at_its_source_takes_no_part_or_registration(source: Engine, destination: Engine) -> None:
    key, blocks = new_key(), source.allocate(3)
    reserved = reserve(destination, key, TOKENS, destination.allocate(3))
    sent = finish(source, key, TOKENS, blocks[:1], last=False)
    assert source.cancel(sent.transfer.transfer_id, "enough").transfers[0].memory == RETURNED
    with unchanged(source, destination):
        with refused(source.api, "FAILED_PRECONDITION", "CANCELLED"):
            finish(source, key, TOKENS, blocks[1:])
        with refused(source.api, "FAILED_PRECONDITION", "CANCELLED"):
            register(source, reserved.grant)
    assert source.get(sent.transfer.transfer_id).state == CANCELLED
    check_a_good_push(source, destination)


def test_a_source_that_gave_up_tells_each_later_registration(source: Engine, destination: Engine) -> None:
    key = new_key()
    reserved = reserve(destination, key, TOKENS, destination.allocate(3))
    fail(source, key, "the prefill was aborted")
    with unchanged(source, destination):
        refusal = source.api.refusal(lambda: register(source, reserved.grant))
    assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", "SOURCE_FAILED")
    assert "the prefill was aborted" in refusal.message


# ---- what only the issuer can detect: the registration fails, and another one may take its place

GRANTS: dict[str, Callable[[common_pb2.Grant], common_pb2.Grant]] = {
    "forged": forge,
    "of another engine": lambda grant: forge(grant, engine_id="somebody-else"),
    "of another life": lambda grant: forge(grant, incarnation=7),
}


def check_waits_for_another(source: Engine, sent: handoff_pb2.FinishedBlocksResponse) -> None:
    """Checks that the source keeps its blocks for another destination until its push is cancelled."""
    id_ = sent.transfer.transfer_id
    wait_until(
        lambda: source.get(id_).waiting_for == transfer_pb2.WAITING_FOR_REGISTRATION, what=lambda: source.get(id_)
    )
    source.cancel(id_)
    end = source.wait(id_)
    assert (end.state, end.memory) == (CANCELLED, RETURNED)


@pytest.mark.parametrize("name", GRANTS)
def test_a_grant_that_its_issuer_does_not_know_moves_nothing(source: Engine, destination: Engine, name: str) -> None:
    key, blocks, target = new_key(), source.allocate(3), destination.allocate(3)
    before = destination.write(target, seed=1)
    reserved = reserve(destination, key, TOKENS, target)
    with memory_unchanged(source):
        wrong = GRANTS[name](reserved.grant)
        register(source, wrong)
        sent = finish(source, key, TOKENS, blocks)
        wait_until(lambda: source.get(sent.transfer.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_REGISTRATION)
        with refused(source.api, "FAILED_PRECONDITION", "TRANSFER_ENDED"):
            register(source, wrong)
        check_waits_for_another(source, sent)
    assert destination.read(target) == before
    check_a_good_push(source, destination)


@pytest.mark.parametrize("how", ["its time was over", "it was cancelled"])
def test_a_grant_whose_reservation_has_ended_moves_nothing(source: Engine, destination: Engine, how: str) -> None:
    key, blocks, target = new_key(), source.allocate(3), destination.allocate(3)
    before = destination.write(target, seed=1)
    timeout = dur(0.01) if how == "its time was over" else None
    reserved = reserve(destination, key, TOKENS, target, registration_timeout=timeout)
    if timeout is None:
        destination.cancel(reserved.transfer.transfer_id)
    ended = destination.wait(reserved.transfer.transfer_id)
    assert reason_of(ended) == ("CANCELLED" if timeout is None else "REGISTRATION_TIMEOUT")
    with memory_unchanged(source, destination):
        register(source, reserved.grant)
        sent = finish(source, key, TOKENS, blocks)
        if timeout is None:  # its only destination will not come again
            assert source.wait(sent.transfer.transfer_id).state == CANCELLED
        else:
            check_waits_for_another(source, sent)
    assert destination.get(reserved.transfer.transfer_id).state == ended.state
    assert destination.read(target) == before
    check_a_good_push(source, destination)


CONTENTS: dict[str, tuple[Any, str]] = {
    "other tokens": (content(prompt(40, seed=1)), "CONTENT_MISMATCH"),
    "an opaque id": (common_pb2.Content(opaque_id=b"prompt", opaque_tokens=40), "CONTENT_REQUIRED"),
    "a longer prompt, which diverges": (content([*TOKENS[:32], *prompt(16, seed=1)]), "CONTENT_RANGE"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_push_of_other_content_fails_with_the_reason(source: Engine, destination: Engine, name: str) -> None:
    wanted, reason = CONTENTS[name]
    key, blocks, target = new_key(), source.allocate(3), destination.allocate(3)
    before = destination.write(target, seed=1)
    with memory_unchanged(source, destination):
        reserved = reserve(destination, key, TOKENS, target, content=wanted, use_tokens=0)
        register(source, reserved.grant)
        check_waits_for_another(source, finish(source, key, TOKENS, blocks))
        ended = destination.wait(reserved.transfer.transfer_id)
    assert (ended.state, ended.memory, reason_of(ended)) == (FAILED, RETURNED, reason)
    assert ended.failure.side == common_pb2.SIDE_SOURCE
    assert ended.failure.next == common_pb2.NEXT_STEP_FIX_REQUEST
    assert destination.read(target) == before
    check_a_good_push(source, destination)


def test_an_engine_may_push_to_itself(source: Engine) -> None:
    key, blocks, target = new_key(), source.allocate(3), source.allocate(3)
    written = source.write(blocks, seed=1)
    with memory_unchanged(source):
        reserved = reserve(source, key, TOKENS, target)
        register(source, reserved.grant)
        sent = finish(source, key, TOKENS, blocks)
        here, there = source.wait(sent.transfer.transfer_id), source.wait(reserved.transfer.transfer_id)
    assert (here.state, there.state) == (SUCCEEDED, SUCCEEDED)
    assert source.read(target) == written


def test_a_prefix_that_both_prompts_share_is_delivered(source: Engine, destination: Engine) -> None:
    key, blocks, target = new_key(), source.allocate(3), destination.allocate(2)
    written = source.write(blocks, seed=3)
    mine = [*TOKENS[:32], *prompt(100, seed=1)]
    reserved = reserve(destination, key, mine, target, use_tokens=32)
    register(source, reserved.grant)
    finish(source, key, TOKENS, blocks)
    end = destination.wait(reserved.transfer.transfer_id)
    assert (end.state, end.use_tokens) == (SUCCEEDED, 32)
    assert destination.read(target) == written[:2]


# ---- keys, and waits that never end


def requests(rpc: str, source: Engine, destination: Engine) -> tuple[Callable[[Any], Message], Any, Any]:
    """Returns a call of a push, a body under an idempotency key, and another body under the same key."""
    key: dict[str, Any] = {"idempotency_key": new_key().hex()}
    made: Any
    if rpc == "ReserveBlocks":
        body: dict[str, Any] = {"transfer_key": new_key(), "blocks": destination.blocks(destination.allocate(3))}
        made = handoff_pb2.ReserveBlocksRequest
        return destination.api.handoff.ReserveBlocks, *(
            made(**key, **body, content=content(TOKENS), priority=i) for i in (0, 1)
        )
    grant = reserve(destination, new_key(), TOKENS, destination.allocate(3)).grant
    made = handoff_pb2.RegisterPushRequest
    return source.api.handoff.RegisterPush, *(made(**key, grant=grant, request_id=id_) for id_ in ("a", "b"))


@pytest.mark.parametrize("rpc", ["ReserveBlocks", "RegisterPush"])
def test_a_repeated_call_of_a_push_acts_once_under_its_key(source: Engine, destination: Engine, rpc: str) -> None:
    send, request, other = requests(rpc, source, destination)
    first = send(request)
    api = destination.api if rpc == "ReserveBlocks" else source.api
    with unchanged(source, destination):
        again = send(request)
        names = ("event_seq", "age", "remaining", "cap_remaining", "duration")
        assert without(again, *names) == without(first, *names)
        with refused(api, "ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED"):
            send(other)


def test_a_step_that_never_comes_ends_a_push_on_both_sides(start: Start) -> None:
    source, destination = start((), (), settings=SETTINGS + "registration_timeout_s = 0.4\n")
    key, blocks, target = new_key(), source.allocate(3), destination.allocate(3)
    before = destination.write(target, seed=1)
    with memory_unchanged(source, destination):
        reserved = reserve(destination, key, TOKENS, target, after_step=LAST_STEP)
        register(source, reserved.grant)
        sent = finish(source, key, TOKENS, blocks, after_step=LAST_STEP)
        here, there = source.wait(sent.transfer.transfer_id), destination.wait(reserved.transfer.transfer_id)
    for end in (here, there):
        assert (end.state, end.memory) == (FAILED, RETURNED), end
        assert end.failure.phase
    assert "REGISTRATION_TIMEOUT" in (reason_of(here), reason_of(there))
    assert destination.read(target) == before
    check_a_good_push(source, destination)
