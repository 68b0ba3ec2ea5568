"""PeerService at the issuer, called by a consumer that follows the rules or breaks them."""

from collections.abc import Iterator

import pytest

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, lease_pb2
from tests.service.conftest import SETTINGS, SHARED
from tests.service.consumer import Consumer, opening
from tests.service.engines import CANCELLED, SUCCEEDED, Engine, ServeProcess, unchanged, wait_until
from tests.service.peers.accesses import VALID, open_one, reason_of
from tests.service.values import dur, ids_of, new_key, prompt

TOKENS = prompt(40)
DROPPED = peer_pb2.CLOSE_OUTCOME_DROPPED
FAILED = peer_pb2.CLOSE_OUTCOME_FAILED
STALE = peer_pb2.VERDICT_STALE
LIVE = lease_pb2.LEASE_STATE_LIVE
DONE = lease_pb2.LEASE_STATE_DONE
HASTY = SETTINGS + "peer_grace_s = 0.6\nopen_wait_s = 0.2\nsettle_timeout_s = 0.2\n"


@pytest.fixture
def consumer(source: Engine) -> Consumer:
    """Returns a consumer that the source knows and hears."""
    consumer = Consumer(source)
    consumer.handshake()
    return consumer


@pytest.fixture(scope="module")
def shared_hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(ServeProcess(tmp_path_factory.mktemp("hasty"), *SHARED, settings=HASTY))
    yield engine
    engine.close()


@pytest.fixture
def hasty(shared_hasty: Engine) -> Iterator[Engine]:
    """Yields an issuer with short timeouts."""
    yield shared_hasty
    shared_hasty.reset()


def test_an_opened_access_tells_the_blocks_and_the_time_that_is_left(source: Engine, consumer: Consumer) -> None:
    blocks = source.allocate(3)
    handed = source.hand_over(TOKENS, blocks)
    access = new_key()
    (opened,) = consumer.open(handed.grant, TOKENS, access).results
    assert ids_of(opened.blocks) == blocks
    assert (opened.token_count, opened.offer_tokens) == (40, 40)
    assert (opened.lease_id, opened.transfer_id) == (handed.lease.lease_id, handed.transfer.transfer_id)
    assert 0 < opened.remaining.seconds <= opened.ttl.seconds
    kinds = {pin.kind: pin for pin in source.pins()}
    assert kinds[admin_pb2.PIN_KIND_ACCESS].peer_engine_id == consumer.engine.engine_id
    assert source.lease(handed.lease.lease_id).open_access_count == 1
    consumer.close(access, FAILED)


def test_a_prefix_opens_only_its_own_blocks(source: Engine, consumer: Consumer) -> None:
    blocks = source.allocate(3)
    handed = source.hand_over(TOKENS, blocks)
    access = new_key()
    (opened,) = consumer.open(handed.grant, TOKENS, access, use_tokens=16).results
    assert ids_of(opened.blocks) == blocks[:1]
    (pin,) = [pin for pin in source.pins() if pin.kind == admin_pb2.PIN_KIND_ACCESS]
    assert ids_of(pin.blocks) == blocks[:1]
    consumer.close(access, FAILED)


def test_opening_again_gives_the_same_answer(source: Engine, consumer: Consumer) -> None:
    grant = source.hand_over(TOKENS).grant
    access = new_key()
    (first,) = consumer.open(grant, TOKENS, access).results
    with unchanged(source):
        (second,) = consumer.open(grant, TOKENS, access).results
    first.ClearField("remaining")
    second.ClearField("remaining")
    assert first == second
    consumer.close(access, FAILED)


def test_an_access_id_of_another_consumer_is_refused(source: Engine, consumer: Consumer) -> None:
    grant = source.hand_over(TOKENS).grant
    access = new_key()
    assert open_one(consumer, grant, access) == ""
    thief = Consumer(source)
    thief.handshake()
    with unchanged(source):
        assert open_one(thief, grant, access) == "ACCESS_REUSED"
        assert thief.settle(access).verdict == STALE
        assert not thief.close(access, DROPPED)
    assert consumer.settle(access).verdict == VALID


def test_an_access_id_of_another_grant_is_refused(source: Engine, consumer: Consumer) -> None:
    first, second = source.hand_over(TOKENS).grant, source.hand_over(TOKENS).grant
    access = new_key()
    assert open_one(consumer, first, access) == ""
    with unchanged(source):
        assert open_one(consumer, second, access) == "ACCESS_REUSED"
    consumer.close(access, FAILED)


@pytest.mark.parametrize("length", [0, 1, 15, 17, 1000])
def test_an_access_id_has_its_length(source: Engine, consumer: Consumer, length: int) -> None:
    grant = source.hand_over(TOKENS).grant
    with unchanged(source):
        (row,) = consumer.open_row(opening(grant.token, TOKENS, b"x" * length)).results
    assert reason_of(row) == "INVALID_FIELD"


def test_a_closed_access_does_not_open_again(source: Engine, consumer: Consumer) -> None:
    grant = source.hand_over(TOKENS).grant
    access = new_key()
    open_one(consumer, grant, access)
    consumer.close(access, FAILED)
    with unchanged(source):
        assert open_one(consumer, grant, access) == "ACCESS_CLOSED"


def test_a_close_that_overtakes_its_opening_refuses_it(source: Engine, consumer: Consumer) -> None:
    grant = source.hand_over(TOKENS).grant
    access = new_key()
    assert not consumer.close(access, FAILED, grant.token)
    with unchanged(source):
        assert open_one(consumer, grant, access) == "ACCESS_CLOSED"


def test_a_drop_that_overtakes_its_opening_reaches_the_lease(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS)
    consumer.close(new_key(), DROPPED, handed.grant.token)
    assert source.lease(handed.lease.lease_id).state == DONE
    assert source.wait(handed.transfer.transfer_id).state == CANCELLED


def test_settling_the_last_part_ends_the_lease_and_may_be_asked_again(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS)
    access = new_key()
    open_one(consumer, handed.grant, access)
    assert consumer.settle(access).verdict == VALID
    assert source.wait(handed.transfer.transfer_id).state == SUCCEEDED
    assert source.lease(handed.lease.lease_id).state == DONE
    with unchanged(source):
        assert consumer.settle(access).verdict == VALID, "a lost reply can be asked for again"


def test_the_verdict_is_forgotten_after_the_settle_timeout(hasty: Engine) -> None:
    consumer = Consumer(hasty)
    consumer.handshake()
    access = new_key()
    open_one(consumer, hasty.hand_over(TOKENS).grant, access)
    assert consumer.settle(access).verdict == VALID
    found = [VALID, common_pb2.FAILURE_REASON_UNSPECIFIED]

    def forgotten() -> bool:
        consumer.handshake()  # keeps the peer alive, which the grace would end otherwise
        verdict = consumer.settle(access)
        found[:] = [verdict.verdict, verdict.reason]
        return verdict.verdict == STALE

    wait_until(forgotten)
    assert found == [STALE, common_pb2.FAILURE_REASON_ACCESS_NOT_FOUND]


def test_a_settle_that_is_not_the_last_keeps_the_access_open(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS)
    access = new_key()
    open_one(consumer, handed.grant, access)
    with unchanged(source):
        assert consumer.settle(access, last=False).verdict == VALID
    assert source.lease(handed.lease.lease_id).open_access_count == 1
    consumer.close(access, FAILED)


def test_after_its_lease_ended_an_access_is_stale_for_ever(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS)
    access = new_key()
    open_one(consumer, handed.grant, access)
    source.release(handed.lease.lease_id)
    for last in (False, True, True):
        verdict = consumer.settle(access, last=last)
        assert (verdict.verdict, verdict.reason) == (STALE, common_pb2.FAILURE_REASON_LEASE_RELEASED)


def test_what_was_never_opened_is_not_valid(source: Engine, consumer: Consumer) -> None:
    with unchanged(source):
        verdict = consumer.settle(new_key())
    assert (verdict.verdict, verdict.reason) == (STALE, common_pb2.FAILURE_REASON_ACCESS_NOT_FOUND)


def test_what_was_closed_is_not_valid(source: Engine, consumer: Consumer) -> None:
    grant = source.hand_over(TOKENS).grant
    access = new_key()
    open_one(consumer, grant, access)
    consumer.close(access, FAILED)
    with unchanged(source):
        verdict = consumer.settle(access)
    assert (verdict.verdict, verdict.reason) == (STALE, common_pb2.FAILURE_REASON_ACCESS_CLOSED)


def test_consumers_count_by_identity_not_by_messages(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS, consumer_count=2)
    for _ in range(3):
        access = new_key()
        open_one(consumer, handed.grant, access)
        assert consumer.settle(access).verdict == VALID
    assert source.lease(handed.lease.lease_id).done_consumer_count == 1
    other = Consumer(source)
    other.handshake()
    access = new_key()
    open_one(other, handed.grant, access)
    other.settle(access)
    assert source.lease(handed.lease.lease_id).state == DONE


def test_another_life_of_a_consumer_is_the_same_consumer(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS, consumer_count=2)
    for life in (consumer, consumer.restarted()):
        life.handshake()
        access = new_key()
        assert open_one(life, handed.grant, access) == ""
        assert life.settle(access).verdict == VALID
    lease = source.lease(handed.lease.lease_id)
    assert (lease.state, lease.done_consumer_count) == (LIVE, 1)


def test_a_failure_does_not_count_as_a_consumer_that_is_done(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS)
    access = new_key()
    open_one(consumer, handed.grant, access)
    consumer.close(access, FAILED)
    assert source.lease(handed.lease.lease_id).state == LIVE
    again = new_key()
    open_one(consumer, handed.grant, again)
    assert consumer.settle(again).verdict == VALID


def test_an_unknown_outcome_reads_as_failed(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS)
    access = new_key()
    open_one(consumer, handed.grant, access)
    assert consumer.close(access, 77)
    assert source.lease(handed.lease.lease_id).state == LIVE


def test_an_unknown_reason_to_keep_reads_as_release(source: Engine, consumer: Consumer) -> None:
    handed = source.hand_over(TOKENS, on_abort=77)
    consumer.close(new_key(), DROPPED, handed.grant.token)
    assert source.lease(handed.lease.lease_id).state == DONE


def test_a_row_that_fails_is_an_answer_and_fails_no_other(source: Engine, consumer: Consumer) -> None:
    grant = source.hand_over(TOKENS).grant
    access = new_key()
    rows = [
        opening(b"", TOKENS, new_key()),
        opening(grant.token, TOKENS, access),
        opening(grant.token[:-1] + bytes([grant.token[-1] ^ 1]), TOKENS, new_key()),
        opening(grant.token, prompt(40, seed=1), new_key()),
    ]
    results = consumer.open_row(*rows).results
    expected = ["GRANT_INVALID", "", "GRANT_INVALID", "CONTENT_MISMATCH"]
    assert [reason_of(row) if row.HasField("failure") else "" for row in results] == expected
    consumer.close(access, FAILED)


def claim(token: bytes, **content: object) -> peer_pb2.AccessOpening:
    return peer_pb2.AccessOpening(access_id=new_key(), token=token, content=peer_pb2.ContentClaim(**content))  # type: ignore[arg-type]


def test_a_claim_must_name_a_prefix_of_the_offer(source: Engine, consumer: Consumer) -> None:
    grant = source.hand_over(TOKENS).grant
    digest = b"\0" * 32
    wrong = {
        "CONTENT_REQUIRED": [
            peer_pb2.AccessOpening(access_id=new_key(), token=grant.token),
            claim(grant.token, token_count=16, opaque_id=b"some prompt"),
        ],
        "CONTENT_RANGE": [
            claim(grant.token, token_count=count, digest=digest) for count in (0, 1, 15, 17, 41, 48, 4_294_967_295)
        ],
        "CONTENT_MISMATCH": [
            claim(grant.token, token_count=16, digest=value) for value in (digest, b"", b"\0" * 31, b"\0" * 1000)
        ],
    }
    with unchanged(source):
        for reason, rows in wrong.items():
            assert {reason_of(row) for row in consumer.open_row(*rows).results} == {reason}


def test_an_opening_waits_a_bounded_time_for_its_lease(source: Engine, consumer: Consumer) -> None:
    """The issuer never announces the lease id: the grant is valid, but the hand-over never came."""
    handed = source.hand_over(TOKENS)
    source.release(handed.lease.lease_id)
    with unchanged(source):
        assert open_one(consumer, handed.grant, new_key()) == "LEASE_RELEASED"


def test_a_million_blocks_in_a_renewal_of_an_access_cost_one_row(source: Engine) -> None:
    request = lease_pb2.RenewLeasesRequest(ttl=dur(1))
    grant = source.hand_over(TOKENS).grant
    request.leases.add().grant.CopyFrom(grant)
    request.leases[0].grant.block_count = 1_000_000
    (row,) = source.api.leases.RenewLeases(request).leases
    assert row.reason == common_pb2.FAILURE_REASON_UNSPECIFIED
