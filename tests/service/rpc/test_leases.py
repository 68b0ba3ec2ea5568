"""Leases: the blocks that they pin, their time, and their ends."""

from collections.abc import Iterable, Iterator

import grpc
import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, lease_pb2, transfer_pb2
from tests.service.api import read_refusal, refused
from tests.service.conftest import SETTINGS, Start
from tests.service.engines import FAILED, RETURNED, SUCCEEDED, Engine, unchanged, wait_until
from tests.service.values import content, dur, group, ids_of, new_key, prompt, seconds

LIVE = lease_pb2.LEASE_STATE_LIVE
TOKENS = prompt(16)


def by_id(lease_id: str) -> lease_pb2.LeaseRef:
    return lease_pb2.LeaseRef(lease_id=lease_id)


def by_key(key: bytes) -> lease_pb2.LeaseRef:
    return lease_pb2.LeaseRef(transfer_key=key)


def by_grant(grant: common_pb2.Grant) -> lease_pb2.LeaseRef:
    return lease_pb2.LeaseRef(grant=grant)


def grant_lease(engine: Engine, **fields: object) -> lease_pb2.GrantLeaseResponse:
    if "blocks" not in fields:
        fields["blocks"] = [group(engine.allocate(1))]
    made = lease_pb2.GrantLeaseRequest(content=content(TOKENS), **engine.of_this_life(fields))
    return engine.api.leases.GrantLease(made)


def renew(engine: Engine, *refs: lease_pb2.LeaseRef, ttl_s: float | None = None) -> list[tuple[float, str]]:
    """Renews leases, and returns (remaining, reason) of each row."""
    request = lease_pb2.RenewLeasesRequest(leases=refs, ttl=None if ttl_s is None else dur(ttl_s))
    return rows_of(engine.api.leases.RenewLeases(request).leases)


def rows_of(rows: Iterable[lease_pb2.RenewedLease]) -> list[tuple[float, str]]:
    prefix = "FAILURE_REASON_"
    return [(seconds(row.remaining), common_pb2.FailureReason.Name(row.reason).removeprefix(prefix)) for row in rows]


def test_a_hand_over_pins_its_blocks_under_a_lease(source: Engine) -> None:
    blocks = source.allocate(2)
    handed = source.hand_over(prompt(32), blocks, request_id="r-1", consumer_count=3)
    lease = source.lease(handed.lease.lease_id)
    assert (lease.state, ids_of(lease.blocks), lease.token_count) == (LIVE, blocks, 32)
    assert (lease.consumer_count, lease.request_id) == (3, "r-1")
    assert (lease.transfer_id, seconds(lease.ttl)) == (handed.transfer.transfer_id, 300.0)
    assert 0 < seconds(lease.remaining) <= 300 < seconds(lease.cap_remaining) <= 3600
    (pin,) = source.pins()
    assert (pin.kind, pin.owner, ids_of(pin.blocks)) == (admin_pb2.PIN_KIND_LEASE, lease.lease_id, blocks)
    counts = source.counts()
    assert (counts.pinned_block_count, counts.leased_block_count, counts.allocated_block_count) == (2, 2, 2)
    assert counts.free_block_count == counts.block_count - 2


def test_one_block_may_be_under_many_leases_and_is_free_after_the_last(source: Engine) -> None:
    blocks = source.allocate(1)
    leases = [source.hand_over(TOKENS, blocks).lease.lease_id for _ in range(3)]
    assert source.free(blocks) == []
    for lease_id in leases[:-1]:
        assert ids_of(source.release(lease_id).freed_blocks) == []
    assert ids_of(source.release(leases[-1]).freed_blocks) == blocks
    assert source.counts().free_block_count == source.counts().block_count


def test_a_lease_is_found_by_its_id_and_by_its_grant(source: Engine) -> None:
    handed = source.hand_over(TOKENS)
    request = lease_pb2.GetLeaseRequest(lease=by_grant(handed.grant))
    assert source.api.leases.GetLease(request).lease.lease_id == handed.lease.lease_id


def test_the_readable_part_of_a_grant_proves_nothing(source: Engine) -> None:
    mine, other = source.hand_over(TOKENS), source.hand_over(TOKENS)
    forged = common_pb2.Grant()
    forged.CopyFrom(mine.grant)
    forged.lease_id = other.lease.lease_id
    forged.engine_id, forged.address = "somebody", "10.0.0.1:1"
    found = source.api.leases.GetLease(lease_pb2.GetLeaseRequest(lease=by_grant(forged))).lease
    assert found.lease_id == mine.lease.lease_id


def test_a_renewal_extends_and_never_shortens(source: Engine) -> None:
    lease_id = source.hand_over(TOKENS, ttl=dur(100)).lease.lease_id
    ((longer, _),) = renew(source, by_id(lease_id), ttl_s=200)
    assert 190 < longer <= 200
    ((same, _),) = renew(source, by_id(lease_id), ttl_s=1)
    assert 190 < same <= 200
    ((own, _),) = renew(source, by_id(lease_id))
    assert 190 < own <= 200
    assert source.lease(lease_id).renewal_count == 3


def test_what_was_handed_over_is_renewed_by_its_transfer_key(source: Engine) -> None:
    key = new_key()
    made = source.hand_over(TOKENS, transfer_key=key, ttl=dur(100))
    ((left, reason),) = renew(source, by_key(key), ttl_s=200)
    assert (reason, left > 190) == ("UNSPECIFIED", True)
    assert source.lease(made.lease.lease_id).renewal_count == 1
    assert renew(source, by_key(new_key())) == [(0.0, "LEASE_NOT_FOUND")]


def test_a_lead_passes_keys_on_to_the_source_of_what_its_requests_wait_for(source: Engine, destination: Engine) -> None:
    key = new_key()
    made = source.hand_over(TOKENS, transfer_key=key)

    def renewed() -> bool:
        here = common_pb2.PeerAddress(address=source.address, engine_id=source.engine_id)
        request = lease_pb2.RenewLeasesRequest(leases=[by_key(key), by_key(new_key())], source=here)
        assert not destination.api.leases.RenewLeases(request).leases
        return source.lease(made.lease.lease_id).renewal_count > 0

    wait_until(renewed)


@pytest.mark.parametrize(
    "source_at", [common_pb2.PeerAddress(), common_pb2.PeerAddress(address="127.0.0.1:9")], ids=["nowhere", "no keys"]
)
def test_what_is_passed_on_are_keys_and_goes_to_an_address(source: Engine, source_at: common_pb2.PeerAddress) -> None:
    rows = [by_key(new_key())] if not source_at.address else [by_id("l-1")]
    with refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        source.api.leases.RenewLeases(lease_pb2.RenewLeasesRequest(leases=rows, source=source_at))


def test_no_lease_is_released_or_read_by_its_transfer_key(source: Engine) -> None:
    key = new_key()
    source.hand_over(TOKENS, transfer_key=key)
    with refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        source.api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=by_key(key)))


def test_no_renewal_passes_the_cap(source: Engine) -> None:
    lease_id = source.hand_over(TOKENS).lease.lease_id
    ((left, reason),) = renew(source, by_id(lease_id), ttl_s=1_000_000)
    assert reason == "UNSPECIFIED"
    assert 3590 < left <= 3600
    lease = source.lease(lease_id)
    assert seconds(lease.remaining) <= seconds(lease.cap_remaining)


def test_a_ttl_above_the_cap_is_clamped_and_the_granted_one_is_told(source: Engine) -> None:
    for ttl in (dur(3601), dur(315_576_000_000)):
        assert seconds(source.hand_over(TOKENS, ttl=ttl).lease.ttl) == 3600
        assert seconds(grant_lease(source, ttl=ttl).grant.ttl) == 3600


@pytest.mark.parametrize("ttl_s", [0.0, -1e-9])
def test_a_ttl_that_is_not_positive_is_refused(source: Engine, ttl_s: float) -> None:
    blocks = source.allocate(1)
    lease_id = source.hand_over(TOKENS, blocks).lease.lease_id
    with unchanged(source):
        with refused(source.api, "INVALID_ARGUMENT", "TTL_INVALID"):
            source.hand_over(TOKENS, blocks, ttl=dur(ttl_s))
        with refused(source.api, "INVALID_ARGUMENT", "TTL_INVALID"):
            grant_lease(source, blocks=[group(blocks)], ttl=dur(ttl_s))
        with refused(source.api, "INVALID_ARGUMENT", "TTL_INVALID"):
            renew(source, by_id(lease_id), ttl_s=ttl_s)


def test_a_lease_that_cannot_be_renewed_is_a_row(source: Engine, destination: Engine) -> None:
    live, over = source.hand_over(TOKENS), source.hand_over(TOKENS)
    source.release(over.lease.lease_id)
    foreign, broken = destination.hand_over(TOKENS).grant, common_pb2.Grant(token=b"nonsense")
    forged = common_pb2.Grant(token=live.grant.token[:-1] + bytes([live.grant.token[-1] ^ 1]))
    refs = [by_id(over.lease.lease_id), by_grant(over.grant), by_id("l-unknown"), by_grant(foreign), by_grant(broken)]
    refs += [by_grant(forged), by_id(live.lease.lease_id)]
    rows = renew(source, *refs)
    released, invalid = ("LEASE_RELEASED",) * 2, ("GRANT_INVALID",) * 2
    expected = [*released, "LEASE_NOT_FOUND", "GRANT_FOREIGN", *invalid, "UNSPECIFIED"]
    assert [reason for _, reason in rows] == expected
    assert [left > 0 for left, _ in rows] == [False] * 6 + [True]


def test_a_renewal_has_at_most_ten_thousand_rows(source: Engine) -> None:
    refs = [by_id("l-x")] * 10_000
    assert len(renew(source, *refs)) == 10_000
    with unchanged(source), refused(source.api, "OUT_OF_RANGE", "LIMIT_EXCEEDED"):
        renew(source, *refs, refs[0])


@pytest.mark.parametrize("ref", [lease_pb2.LeaseRef(), lease_pb2.LeaseRef(lease_id="")], ids=["unset", "empty"])
def test_a_lease_must_be_named(source: Engine, ref: lease_pb2.LeaseRef) -> None:
    with unchanged(source):
        refusal = source.api.refusal(lambda: source.api.leases.ReleaseLease(lease_pb2.ReleaseLeaseRequest(lease=ref)))
        assert refusal.reason in {"INVALID_FIELD", "LEASE_NOT_FOUND"}


def test_releasing_ends_the_lease_and_its_transfer_and_may_be_repeated(source: Engine) -> None:
    handed = source.hand_over(TOKENS)
    for _ in range(2):
        assert source.release(handed.lease.lease_id).lease.state == lease_pb2.LEASE_STATE_RELEASED
    ended = source.get(handed.transfer.transfer_id)
    assert (ended.state, ended.memory) == (transfer_pb2.TRANSFER_STATE_CANCELLED, RETURNED)
    assert ended.failure.reason == common_pb2.FAILURE_REASON_LEASE_RELEASED


def test_a_lease_that_is_not_renewed_ends_by_itself(source: Engine) -> None:
    blocks = source.allocate(1)
    handed = source.hand_over(TOKENS, blocks, ttl=dur(0.05))
    source.free(blocks)
    ended = source.wait(handed.transfer.transfer_id)
    assert (ended.state, ended.failure.reason) == (FAILED, common_pb2.FAILURE_REASON_LEASE_EXPIRED)
    assert source.lease(handed.lease.lease_id).state == lease_pb2.LEASE_STATE_EXPIRED
    assert source.counts().free_block_count == source.counts().block_count
    assert renew(source, by_id(handed.lease.lease_id)) == [(0.0, "LEASE_EXPIRED")]


def test_what_is_left_of_a_lease_is_told_as_of_now_though_nothing_has_happened_since(source: Engine) -> None:
    ref = by_id(source.hand_over(TOKENS).lease.lease_id)

    def left() -> list[float]:
        found = source.api.leases.GetLease(lease_pb2.GetLeaseRequest(lease=ref)).lease
        (row,) = source.api.leases.ListLeases(lease_pb2.ListLeasesRequest()).leases
        return [seconds(one.remaining) for one in (found, row)]

    first = left()
    wait_until(lambda: max(left()) < min(first))


def test_an_ended_lease_is_not_listed(source: Engine) -> None:
    lease_id = source.hand_over(TOKENS).lease.lease_id
    source.release(lease_id)
    assert list(source.api.leases.ListLeases(lease_pb2.ListLeasesRequest()).leases) == []


def test_a_granted_lease_has_labels_and_no_transfer(source: Engine) -> None:
    reply = grant_lease(source, labels={"tenant": "a", "cache": "system prompt"}, request_id="r-9")
    lease = source.lease(reply.lease.lease_id)
    assert dict(lease.labels) == {"tenant": "a", "cache": "system prompt"}
    assert (lease.transfer_id, lease.request_id) == ("", "r-9")
    assert reply.grant.lease_id == lease.lease_id


@pytest.mark.parametrize(
    "labels",
    [{str(i): "" for i in range(17)}, {"k" * 65: ""}, {"": "v" * 65}],
    ids=["too many", "long key", "long value"],
)
def test_labels_are_bounded(source: Engine, labels: dict[str, str]) -> None:
    blocks = source.allocate(1)
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        grant_lease(source, blocks=[group(blocks)], labels=labels)


def test_leases_are_bounded(start: Start) -> None:
    (engine,) = start((), settings=SETTINGS + "leases = 3\n")
    handed = [engine.hand_over(TOKENS) for _ in range(3)]
    blocks = engine.allocate(1)
    refusal = engine.api.refusal(lambda: engine.hand_over(TOKENS, blocks))
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert refusal.retry_delay_s
    status = engine.api.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert (status.admission, status.counts.lease_count) == (handshake_pb2.ADMISSION_OVERLOADED, 3)
    engine.release(handed[0].lease.lease_id)
    assert engine.hand_over(TOKENS, blocks).HasField("grant")


Requests = list[lease_pb2.KeepAliveRequest]


def keep_alive(engine: Engine, requests: Requests) -> Iterator[lease_pb2.KeepAliveResponse]:
    return engine.api.leases.KeepAlive(iter(requests), timeout=15)


def test_the_keep_alive_stream_answers_every_request_in_order(source: Engine) -> None:
    live = source.hand_over(TOKENS, ttl=dur(10)).lease.lease_id
    requests = [lease_pb2.KeepAliveRequest(leases=[by_id(live)], ttl=dur(ttl)) for ttl in (50, 100, 150)]
    left = [rows_of(reply.leases)[0][0] for reply in keep_alive(source, requests)]
    assert [round(value / 50) for value in left] == [1, 2, 3]


def test_a_dead_lease_is_a_row_of_the_stream_and_never_its_end(source: Engine) -> None:
    live, dead = source.hand_over(TOKENS).lease.lease_id, source.hand_over(TOKENS).lease.lease_id
    source.release(dead)
    requests = [lease_pb2.KeepAliveRequest(leases=[by_id(dead)]), lease_pb2.KeepAliveRequest(leases=[by_id(live)])]
    reasons = [rows_of(reply.leases)[0][1] for reply in keep_alive(source, requests)]
    assert reasons == ["LEASE_RELEASED", "UNSPECIFIED"]


def test_ending_the_stream_ends_no_lease(source: Engine) -> None:
    lease_id = source.hand_over(TOKENS).lease.lease_id
    assert len(list(keep_alive(source, [lease_pb2.KeepAliveRequest(leases=[by_id(lease_id)])]))) == 1
    assert source.lease(lease_id).state == LIVE


def test_a_bad_request_ends_the_stream_with_its_reason(source: Engine) -> None:
    stream = keep_alive(source, [lease_pb2.KeepAliveRequest(ttl=dur(-1))])
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    refusal = read_refusal("/kvgrpc.v1.LeaseService/KeepAlive", caught.value)
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "TTL_INVALID")
    source.check_alive()


def test_consumers_are_bounded(source: Engine) -> None:
    blocks = source.allocate(1)
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        source.hand_over(TOKENS, blocks, consumer_count=1025)


def test_a_lease_ends_when_all_declared_consumers_are_done(source: Engine, destination: Engine, start: Start) -> None:
    (other,) = start(())
    handed = source.hand_over(TOKENS, consumer_count=2)
    for done, engine in enumerate([destination, other], start=1):
        engine.wait(engine.pull(handed.grant, TOKENS, engine.allocate(1)).transfer_id)
        wait_until(lambda: source.lease(handed.lease.lease_id).done_consumer_count == done)  # noqa: B023
    assert source.lease(handed.lease.lease_id).state == lease_pb2.LEASE_STATE_DONE


def test_a_pull_that_waits_for_blocks_keeps_its_lease_alive_beyond_its_ttl(source: Engine, destination: Engine) -> None:
    ttl_s = 2.0
    blocks, target = source.allocate(4), destination.allocate(4)
    written = source.write(blocks, seed=2)
    handed = source.hand_over(prompt(64), blocks, ttl=dur(ttl_s))
    pulled = destination.pull(handed.grant, prompt(64), None)
    wait_until(lambda: seconds(source.lease(handed.lease.lease_id).age) > 1.5 * ttl_s)
    lease = source.lease(handed.lease.lease_id)
    assert lease.state == LIVE
    assert lease.renewal_count >= 3
    assert destination.get(pulled.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_BLOCKS
    destination.give(pulled.transfer_id, target)
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
    assert destination.read(target) == written
