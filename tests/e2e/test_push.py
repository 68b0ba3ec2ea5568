"""Pushes between two processes: blocks that D reserved are filled as soon as P has them."""

import pytest

from kvgrpc.client import name_of
from kvgrpc.v1 import common_pb2, transfer_pb2
from tests.e2e.conftest import Pair, scattered
from tests.service.engines import CANCELLED, FAILED, RETURNED, SUCCEEDED
from tests.service.pushes import fail, finish, register, reserve
from tests.service.values import dur, new_key, prompt


@pytest.mark.parametrize("first", ["finished", "registered"])
def test_a_push_brings_exactly_the_bytes_whatever_comes_first(pair: Pair, path: str, first: str) -> None:
    source, destination = pair
    tokens, key = prompt(20 * 16 - 5), new_key()
    blocks, target = scattered(source, 20), scattered(destination, 20)
    written = source.write(blocks, seed=1)
    bystanders = destination.allocate(4)
    kept = destination.write(bystanders, seed=100)
    reserved = reserve(destination, key, tokens, target)
    if first == "registered":
        register(source, reserved.grant)
    sent = finish(source, key, tokens, blocks)
    if first == "finished":
        register(source, reserved.grant)
    end = destination.wait(reserved.transfer.transfer_id)
    assert end.state == SUCCEEDED, end.failure
    assert destination.read(target) == written
    assert destination.read(bystanders) == kept
    send = source.wait(sent.transfer.transfer_id)
    assert send.state == SUCCEEDED
    moved_over = {name_of(common_pb2.DataPath, moved.data_path) for moved in (*end.paths, *send.paths)}
    assert moved_over == {path.partition("-")[0]}
    assert (source.counts().pinned_block_count, destination.counts().pinned_block_count) == (0, 0)


def test_the_destination_registers_a_push_whose_source_it_knows(pair: Pair) -> None:
    source, destination = pair
    tokens, key = prompt(48), new_key()
    blocks, target = source.allocate(3), destination.allocate(3)
    written = source.write(blocks, seed=1)
    where = common_pb2.PeerAddress(address=source.address)
    reserved = reserve(destination, key, tokens, target, source=where)
    sent = finish(source, key, tokens, blocks)
    assert destination.wait(reserved.transfer.transfer_id).state == SUCCEEDED
    assert destination.read(target) == written
    assert source.wait(sent.transfer.transfer_id).state == SUCCEEDED


def test_what_the_destination_holds_is_not_moved(pair: Pair) -> None:
    source, destination = pair
    tokens, key = prompt(100), new_key()
    blocks, target = source.allocate(7), destination.allocate(5)
    written = source.write(blocks, seed=1)
    reserved = reserve(destination, key, tokens, target, have_tokens=40)
    register(source, reserved.grant)
    finish(source, key, tokens, blocks)
    end = destination.wait(reserved.transfer.transfer_id)
    assert (end.state, end.block_count) == (SUCCEEDED, 5)
    assert destination.read(target) == written[2:]


def test_chunks_and_layers_move_as_they_come_and_can_be_waited_for(pair: Pair) -> None:
    source, destination = pair
    tokens, key = prompt(6 * 16), new_key()
    blocks, target = source.allocate(6), destination.allocate(6)
    written = source.write(blocks, seed=1)
    reserved = reserve(destination, key, tokens, target)
    register(source, reserved.grant)
    first, second = common_pb2.LayerRange(first=0, count=1), common_pb2.LayerRange(first=1, count=1)
    finish(source, key, tokens, blocks[:4], layers=first, last=False)
    finish(source, key, tokens, blocks[4:], layers=first, last=False)
    request = transfer_pb2.WaitTransferRequest(transfer_id=reserved.transfer.transfer_id, layers=first, timeout=dur(20))
    found = destination.api.transfers.WaitTransfer(request).transfer
    assert list(found.layers_done) == [first]
    assert found.state == transfer_pb2.TRANSFER_STATE_ACTIVE
    finish(source, key, tokens, blocks, layers=second)
    end = destination.wait(reserved.transfer.transfer_id)
    assert end.state == SUCCEEDED, end.failure
    assert destination.read(target) == written


def test_a_source_that_cannot_deliver_says_so_at_once(pair: Pair) -> None:
    source, destination = pair
    tokens, key = prompt(48), new_key()
    reserved = reserve(destination, key, tokens, destination.allocate(3))
    register(source, reserved.grant)
    fail(source, key, "the prefill was aborted")
    end = destination.wait(reserved.transfer.transfer_id)
    assert (end.state, end.memory) == (FAILED, RETURNED)
    assert "the prefill was aborted" in end.failure.message


def test_a_push_that_the_destination_cancels_ends_on_both_sides(pair: Pair) -> None:
    source, destination = pair
    tokens, key = prompt(48), new_key()
    reserved = reserve(destination, key, tokens, destination.allocate(3))
    register(source, reserved.grant)
    (ended,) = destination.cancel(reserved.transfer.transfer_id).transfers
    assert ended.state == CANCELLED
    assert destination.wait(reserved.transfer.transfer_id).memory == RETURNED
    sent = finish(source, key, tokens, source.allocate(3))
    end = source.wait(sent.transfer.transfer_id)
    assert (end.state, end.memory) == (CANCELLED, RETURNED)
    assert (source.counts().pinned_block_count, destination.counts().pinned_block_count) == (0, 0)


def test_two_pushes_never_take_each_others_blocks(pair: Pair) -> None:
    source, destination = pair
    requests = [(prompt(48, seed), new_key(), source.allocate(3), destination.allocate(3)) for seed in (1, 2)]
    written = [source.write(blocks, seed) for seed, (_, _, blocks, _) in enumerate(requests)]
    reserved = [reserve(destination, key, tokens, target) for tokens, key, _, target in requests]
    for tokens, key, blocks, _ in requests:
        finish(source, key, tokens, blocks)
    for one in reversed(reserved):
        register(source, one.grant)
    for one, (_, _, _, target), sent in zip(reserved, requests, written, strict=True):
        assert destination.wait(one.transfer.transfer_id).state == SUCCEEDED
        assert destination.read(target) == sent
