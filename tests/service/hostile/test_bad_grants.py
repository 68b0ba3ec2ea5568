"""Invalid grants and contents: each causes a typed error and changes nothing, and the server goes on."""

import pytest

from kvgrpc.core.values import grants
from kvgrpc.v1 import common_pb2, lease_pb2
from tests.service.api import refused
from tests.service.engines import FAILED, RETURNED, SUCCEEDED, Engine, memory_unchanged, unchanged
from tests.service.hostile.forged_grants import NO_TOKENS, forge
from tests.service.values import content, dur, new_key, prompt

TOKENS = prompt(40)
MINUS_ONE = 4_294_967_295
"""The uint32 that a negative id turns into."""


# ---- grants


@pytest.mark.parametrize("change", NO_TOKENS)
def test_what_is_no_grant_is_refused_everywhere(source: Engine, destination: Engine, change: str) -> None:
    token = NO_TOKENS[change](source.hand_over(TOKENS).grant.token)
    broken, blocks = common_pb2.Grant(token=token), destination.allocate(3)
    ref = lease_pb2.LeaseRef(grant=broken)
    with unchanged(source, destination):
        with refused(destination.api, "INVALID_ARGUMENT", "GRANT_INVALID"):
            destination.pull(broken, TOKENS, blocks)
        for call in (
            lambda: source.api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=ref)),
            lambda: source.api.leases.GetLease(lease_pb2.GetLeaseRequest(lease=ref)),
        ):
            assert source.api.refusal(call).reason in {"GRANT_INVALID", "LEASE_NOT_FOUND"}


def end_of_pull(source: Engine, destination: Engine, grant: common_pb2.Grant, tokens: list[int] | None = None) -> str:
    """Returns the reason of a pull that must fail. Checks that both engines hold the same memory as before."""
    blocks = destination.allocate(3)
    with memory_unchanged(source, destination):
        pulled = destination.pull(grant, tokens or TOKENS, blocks)
        end = destination.wait(pulled.transfer_id)
    assert (end.state, end.memory) == (FAILED, RETURNED)
    assert end.failure.message
    assert end.failure.next != common_pb2.NEXT_STEP_UNSPECIFIED
    return common_pb2.FailureReason.Name(end.failure.reason).removeprefix("FAILURE_REASON_")


def test_a_forged_grant_opens_nothing(source: Engine, destination: Engine) -> None:
    grant = source.hand_over(TOKENS).grant
    flipped = common_pb2.Grant(token=grant.token[:-1] + bytes([grant.token[-1] ^ 1]))
    assert end_of_pull(source, destination, flipped) == "GRANT_INVALID"
    assert end_of_pull(source, destination, forge(grant)) == "GRANT_INVALID"
    other = source.hand_over(TOKENS).grant
    assert end_of_pull(source, destination, forge(grant, lease_id=other.lease_id)) == "GRANT_INVALID"


def test_a_grant_that_names_another_engine_at_the_address_opens_nothing(source: Engine, destination: Engine) -> None:
    grant = source.hand_over(TOKENS).grant
    assert end_of_pull(source, destination, forge(grant, engine_id="somebody-else")) == "WRONG_ENGINE"


def test_a_grant_of_another_life_opens_nothing(source: Engine, destination: Engine) -> None:
    grant = source.hand_over(TOKENS).grant
    assert end_of_pull(source, destination, forge(grant, incarnation=7)) == "INCARNATION_CHANGED"


def test_a_grant_whose_lease_has_ended_opens_nothing(source: Engine, destination: Engine) -> None:
    released, expired = source.hand_over(TOKENS), source.hand_over(TOKENS, ttl=dur(0.02))
    source.release(released.lease.lease_id)
    source.wait(expired.transfer.transfer_id)
    assert end_of_pull(source, destination, released.grant) == "LEASE_RELEASED"
    assert end_of_pull(source, destination, expired.grant) == "LEASE_EXPIRED"


def test_a_grant_that_another_consumer_used_up_opens_nothing(source: Engine, destination: Engine) -> None:
    handed = source.hand_over(TOKENS)
    pulled = destination.pull(handed.grant, TOKENS, destination.allocate(3))
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
    source.wait(handed.transfer.transfer_id)
    assert end_of_pull(source, destination, handed.grant) == "LEASE_RELEASED"


def test_a_write_grant_is_not_for_pulling(source: Engine, destination: Engine) -> None:
    grant = forge(source.hand_over(TOKENS).grant, access=grants.AccessKind.WRITE)
    blocks = destination.allocate(3)
    with unchanged(source, destination), refused(destination.api, "FAILED_PRECONDITION", "GRANT_WRONG_ACCESS"):
        destination.pull(grant, TOKENS, blocks)


def test_a_grant_with_an_address_off_the_list_is_refused(source: Engine, destination: Engine) -> None:
    grant = forge(source.hand_over(TOKENS).grant, address="169.254.169.254:80")
    blocks = destination.allocate(3)
    with unchanged(source, destination), refused(destination.api, "PERMISSION_DENIED", "DIAL_REFUSED"):
        destination.pull(grant, TOKENS, blocks)


def test_a_grant_of_another_request_than_the_intent_is_refused(source: Engine, destination: Engine) -> None:
    grant, blocks = source.hand_over(TOKENS).grant, destination.allocate(3)
    with unchanged(source, destination), refused(destination.api, "PERMISSION_DENIED", "TRANSFER_KEY_MISMATCH"):
        destination.pull(grant, TOKENS, blocks, transfer_key=new_key())


def test_a_foreign_grant_is_refused_by_the_lease_calls(source: Engine, destination: Engine) -> None:
    ref = lease_pb2.LeaseRef(grant=destination.hand_over(TOKENS).grant)
    with unchanged(source, destination), refused(source.api, "PERMISSION_DENIED", "GRANT_FOREIGN"):
        source.api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=ref))


# ---- content


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(content(prompt(40, seed=1)), id="other tokens"),
        pytest.param(content(TOKENS, adapter="lora"), id="another adapter"),
        pytest.param(content(TOKENS, cache_salt="salt"), id="another salt"),
        pytest.param(
            common_pb2.Content(chain=common_pb2.ContentChain(digests=b"x" * 96, token_count=40)), id="other digests"
        ),
    ],
)
def test_a_pull_of_other_content_gets_nothing(source: Engine, destination: Engine, wanted: common_pb2.Content) -> None:
    grant, target = source.hand_over(TOKENS).grant, destination.allocate(3)
    before = destination.write(target, seed=1)
    with memory_unchanged(source, destination):
        pulled = destination.pull(grant, TOKENS, target, content=wanted)
        end = destination.wait(pulled.transfer_id)
    assert end.failure.reason == common_pb2.FAILURE_REASON_CONTENT_MISMATCH
    assert destination.read(target) == before


def test_content_that_diverges_below_k_is_a_mismatch_and_above_k_is_none(source: Engine, destination: Engine) -> None:
    mine = [*TOKENS[:20], *prompt(20, seed=3)]
    grant = source.hand_over(TOKENS, on_abort=common_pb2.ON_ABORT_KEEP).grant
    target = destination.allocate(3)
    with memory_unchanged(source, destination):
        bad = destination.pull(grant, mine, target[:2], use_tokens=32)
        assert destination.wait(bad.transfer_id).failure.reason == common_pb2.FAILURE_REASON_CONTENT_MISMATCH
    good = destination.pull(grant, mine, target[:1], use_tokens=16)
    end = destination.wait(good.transfer_id)
    assert (end.state, end.use_tokens) == (SUCCEEDED, 16)


@pytest.mark.parametrize(("tokens", "use_tokens"), [(40, 17), (40, MINUS_ONE), (8, 0)])
def test_unaligned_or_excess_tokens_fail(source: Engine, destination: Engine, tokens: int, use_tokens: int) -> None:
    grant = source.hand_over(TOKENS).grant
    with unchanged(source, destination):
        refusal = destination.api.refusal(lambda: destination.pull(grant, TOKENS[:tokens], None, use_tokens=use_tokens))
    assert refusal.reason == "CONTENT_RANGE"


def test_an_opaque_content_is_compared_whole(source: Engine, destination: Engine) -> None:
    mine, other = (common_pb2.Content(opaque_id=id_, opaque_tokens=40) for id_ in (b"mine", b"other"))
    grant = source.hand_over(TOKENS, content=mine).grant
    target = destination.allocate(3)
    for wanted, reason in [
        (other, common_pb2.FAILURE_REASON_CONTENT_MISMATCH),
        (content(TOKENS), common_pb2.FAILURE_REASON_CONTENT_REQUIRED),
    ]:
        with memory_unchanged(source, destination):
            pulled = destination.pull(grant, TOKENS, target, content=wanted)
            assert destination.wait(pulled.transfer_id).failure.reason == reason
    with unchanged(source, destination):
        refusal = destination.api.refusal(lambda: destination.pull(grant, TOKENS, None, content=mine, use_tokens=16))
    assert refusal.reason == "CONTENT_RANGE"
    pulled = destination.pull(grant, TOKENS, target, content=mine)
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
