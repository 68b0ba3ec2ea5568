"""Two servers of different versions move blocks between each other, in both directions and over every data path."""

from kvgrpc.client import name_of
from kvgrpc.v1 import common_pb2, transfer_pb2
from kvgrpc.v1.lease_pb2 import LEASE_STATE_LIVE
from tests.service.engines import CANCELLED, SUCCEEDED, Engine, wait_until
from tests.service.pushes import finish, register, reserve
from tests.service.values import dur, new_key, prompt, seconds
from tests.skew.conftest import Pair

TTL_S = 1.0


def check_over(pair: Pair, path: str, sent: str, received: str) -> None:
    """Checks that both ends of a transfer succeeded over that data path, and that no block is pinned any more."""
    source, destination = pair
    ends = destination.wait(received), source.wait(sent)
    assert [end.state for end in ends] == [SUCCEEDED, SUCCEEDED], [end.failure for end in ends]
    assert {name_of(common_pb2.DataPath, moved.data_path) for end in ends for moved in end.paths} == {path}
    assert [engine.counts().pinned_block_count for engine in pair] == [0, 0]


def test_a_pull_brings_exactly_the_bytes(pair: Pair, path: str) -> None:
    source, destination = pair
    tokens = prompt(20 * 16 - 5)
    blocks, target = source.allocate(20), destination.allocate(20)
    written = source.write(blocks, seed=1)
    given = source.hand_over(tokens, blocks)
    pull = destination.pull(given.grant, tokens, target)
    check_over(pair, path, given.transfer.transfer_id, pull.transfer_id)
    assert destination.read(target) == written


def test_a_push_that_its_destination_registers_brings_exactly_the_bytes(pair: Pair, path: str) -> None:
    source, destination = pair
    tokens, key = prompt(48), new_key()
    blocks, target = source.allocate(3), destination.allocate(3)
    written = source.write(blocks, seed=2)
    reserved = reserve(destination, key, tokens, target, source=common_pb2.PeerAddress(address=source.address))
    sent = finish(source, key, tokens, blocks)
    check_over(pair, path, sent.transfer.transfer_id, reserved.transfer.transfer_id)
    assert destination.read(target) == written


def test_a_push_in_chunks_and_layers_brings_exactly_the_bytes(pair: Pair, path: str) -> None:
    source, destination = pair
    tokens, key = prompt(6 * 16), new_key()
    blocks, target = source.allocate(6), destination.allocate(6)
    written = source.write(blocks, seed=3)
    reserved = reserve(destination, key, tokens, target)
    register(source, reserved.grant)
    first, second = common_pb2.LayerRange(first=0, count=1), common_pb2.LayerRange(first=1, count=1)
    finish(source, key, tokens, blocks[:4], layers=first, last=False)
    finish(source, key, tokens, blocks[4:], layers=first, last=False)
    request = transfer_pb2.WaitTransferRequest(transfer_id=reserved.transfer.transfer_id, layers=first, timeout=dur(20))
    assert list(destination.api.transfers.WaitTransfer(request).transfer.layers_done) == [first]
    sent = finish(source, key, tokens, blocks, layers=second)
    check_over(pair, path, sent.transfer.transfer_id, reserved.transfer.transfer_id)
    assert destination.read(target) == written


def age_s(engine: Engine, lease_id: str) -> float:
    return seconds(engine.lease(lease_id).age)


def test_a_destination_renews_a_lease_while_it_has_no_blocks(pair: Pair, path: str) -> None:
    source, destination = pair
    tokens = prompt(32)
    blocks, target = source.allocate(2), destination.allocate(2)
    written = source.write(blocks, seed=4)
    given = source.hand_over(tokens, blocks, ttl=dur(TTL_S))
    pull = destination.pull(given.grant, tokens, None)
    wait_until(lambda: age_s(source, given.lease.lease_id) > 3 * TTL_S)
    assert source.lease(given.lease.lease_id).state == LEASE_STATE_LIVE
    destination.give(pull.transfer_id, target)
    check_over(pair, path, given.transfer.transfer_id, pull.transfer_id)
    assert destination.read(target) == written


def test_a_cancel_at_the_destination_ends_both_sides(pair: Pair) -> None:
    source, destination = pair
    tokens = prompt(32)
    given = source.hand_over(tokens)
    pull = destination.pull(given.grant, tokens, None)
    destination.cancel(pull.transfer_id, "the client hung up")
    assert destination.wait(pull.transfer_id).state == CANCELLED
    assert source.wait(given.transfer.transfer_id).state == CANCELLED
    assert source.counts().pinned_block_count == 0
