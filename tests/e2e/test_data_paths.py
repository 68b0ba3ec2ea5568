"""A pull over each data path, between two processes: the right bytes arrive in the right blocks, and only there."""

from kvgrpc.client import name_of
from kvgrpc.v1 import common_pb2, handoff_pb2, handshake_pb2, transfer_pb2
from tests.e2e.conftest import Pair, begin, scattered
from tests.service.conftest import Start
from tests.service.engines import (
    CANCELLED,
    FAILED,
    QUARANTINED,
    RETURNED,
    SUCCEEDED,
    memory_unchanged,
    wait_until,
)
from tests.service.values import content, prompt

ACTIVE = transfer_pb2.TRANSFER_STATE_ACTIVE


def test_a_pull_brings_exactly_the_bytes_of_the_offer(pair: Pair, path: str) -> None:
    source, destination = pair
    tokens = prompt(20 * 16 - 5)
    for seed, (here, there) in enumerate([(source, destination), (destination, source)]):
        blocks, target = scattered(here, 20), scattered(there, 20)
        written = here.write(blocks, seed)
        bystanders = there.allocate(4)
        kept = there.write(bystanders, seed=100)
        handed = here.hand_over(tokens, blocks)
        end = there.wait(there.pull(handed.grant, tokens, target).transfer_id)
        assert end.state == SUCCEEDED, end.failure
        assert there.read(target) == written
        assert there.read(bystanders) == kept
        assert name_of(common_pb2.DataPath, end.paths[0].data_path) == path.partition("-")[0]
        assert end.moved_bytes == end.total_bytes == 20 * 2048
        assert here.wait(handed.transfer.transfer_id).state == SUCCEEDED


def test_what_the_consumer_holds_or_does_not_want_is_not_moved(pair: Pair) -> None:
    source, destination = pair
    tokens = prompt(100)
    blocks = source.allocate(7)
    written = source.write(blocks, seed=1)
    handed = source.hand_over(tokens, blocks, on_abort=common_pb2.ON_ABORT_KEEP, consumer_count=2)
    target = destination.allocate(3)
    # Tokens 0..39 are held, so blocks 0 and 1 are complete. The first 80 tokens are wanted, so blocks 2, 3 and 4 move.
    request = handoff_pb2.PullBlocksRequest(
        grant=handed.grant, content=content(tokens), use_tokens=80, destination=destination.into(target, have_tokens=40)
    )
    pulled = destination.api.handoff.PullBlocks(request).transfer
    end = destination.wait(pulled.transfer_id)
    assert (end.state, end.use_tokens, end.block_count) == (SUCCEEDED, 80, 3)
    assert destination.read(target) == written[2:5]


def test_a_cancel_in_flight_comes_to_rest(start: Start, path: str) -> None:
    source, destination = begin(start, path, "--bandwidth-limit-bytes-per-s", "60000")
    tokens = prompt(256)
    handed = source.hand_over(tokens, on_abort=common_pb2.ON_ABORT_KEEP)
    pulled = destination.pull(handed.grant, tokens, destination.allocate(16))
    wait_until(lambda: destination.get(pulled.transfer_id).state == ACTIVE)
    (ended,) = destination.cancel(pulled.transfer_id).transfers
    assert (ended.state, ended.memory) == (CANCELLED, QUARANTINED)
    assert destination.wait(pulled.transfer_id, timeout_s=8.0).memory == RETURNED
    assert destination.counts().pinned_block_count == 0


def test_the_best_path_that_both_sides_have_is_chosen_and_the_others_are_accounted_for(start: Start) -> None:
    source, destination = start(("--data-paths", "cma,nixl"), ("--data-paths", "shm,nixl,cma"))
    request = handshake_pb2.ConnectPeerRequest(peer=common_pb2.PeerAddress(address=source.address))
    (path,) = destination.api.handshake.ConnectPeer(request).peer.paths
    assert path.data_path == common_pb2.DATA_PATH_NIXL
    assert [row.data_path for row in path.rejected_paths] == [common_pb2.DATA_PATH_SHM]
    assert path.rejected_paths[0].why


def test_swapped_grants_give_no_request_the_bytes_of_another(start: Start) -> None:
    source, destination = start((), ())
    mine, yours = prompt(32, seed=1), prompt(32, seed=2)
    grants = []
    for seed, tokens in enumerate((mine, yours)):
        blocks = source.allocate(2)
        source.write(blocks, seed)
        grants.append(source.hand_over(tokens, blocks, on_abort=common_pb2.ON_ABORT_KEEP).grant)
    target = destination.allocate(2)
    before = destination.write(target, seed=50)
    for tokens, grant in zip((mine, yours), reversed(grants), strict=True):
        with memory_unchanged(destination):
            end = destination.wait(destination.pull(grant, tokens, target).transfer_id)
        assert (end.state, end.memory) == (FAILED, RETURNED)
        assert end.failure.reason == common_pb2.FAILURE_REASON_CONTENT_MISMATCH
        assert end.failure.phase == common_pb2.TRANSFER_PHASE_OPEN
        assert end.failure.next == common_pb2.NEXT_STEP_FIX_REQUEST
        assert destination.read(target) == before
    for tokens, grant in zip((mine, yours), grants, strict=True):
        assert destination.wait(destination.pull(grant, tokens, target).transfer_id).state == SUCCEEDED
