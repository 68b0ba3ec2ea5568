"""Two servers on two hosts, which are network namespaces: by default bytes go over the data path collective."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2
from tests.e2e.conftest import Pair, scattered
from tests.hosts import hosts
from tests.service.conftest import SETTINGS
from tests.service.engines import SMALL_POOL, SUCCEEDED, Engine, ServeProcess
from tests.service.pushes import finish, register, reserve
from tests.service.values import new_key, prompt

TRUST = ("--insecure", "--dial-allow", f"{hosts.NETWORK}.0/24", "--read-blocks", "--drain-s", "0", *SMALL_POOL)

APART = "^sm"
"""Setting for UCX, which takes two network namespaces of one kernel for one host and would read processes with cma."""


@pytest.fixture(scope="module")
def far_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Yields the source on the first host and the destination on the second, with all data paths."""
    folder = tmp_path_factory.mktemp("two-hosts")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
        environment.setenv("UCX_TLS", APART)
        why_not = stack.enter_context(hosts.two_hosts())
        if why_not:
            pytest.skip(why_not)
        engines = []
        for host in hosts.BOTH:
            flags = ("--listen", f"{host.address}:0", *TRUST)
            process = ServeProcess(folder / host.name, *flags, settings=SETTINGS, fresh=True, within=host.within)
            stack.callback(process.end)
            engines.append(Engine(process))
            stack.callback(engines[-1].api.close)
        yield engines[0], engines[1]


def test_between_hosts_the_handshake_chooses_collective_and_says_why_not_the_others(far_apart: Pair) -> None:
    source, destination = far_apart
    request = handshake_pb2.ConnectPeerRequest(peer=common_pb2.PeerAddress(address=source.address))

    destination.api.handshake.ConnectPeer(request)
    (peer,) = destination.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
    (path,) = peer.paths
    assert path.data_path == common_pb2.DATA_PATH_COLLECTIVE
    assert path.why.startswith("Gloo, over TCP")
    rejected = {row.data_path: row.why for row in path.rejected_paths}
    assert list(rejected) == [common_pb2.DATA_PATH_SHM, common_pb2.DATA_PATH_CMA, common_pb2.DATA_PATH_NIXL]
    assert all(rejected.values())
    assert "TCP" in rejected[common_pb2.DATA_PATH_NIXL]


def test_a_pull_and_a_push_between_hosts_bring_exactly_the_bytes(far_apart: Pair) -> None:
    tokens = prompt(20 * 16 - 5)
    for seed, (source, destination) in enumerate((far_apart, far_apart[::-1])):
        blocks, target = scattered(source, 20), scattered(destination, 20)
        written = source.write(blocks, seed)
        bystanders = destination.allocate(4)
        kept = destination.write(bystanders, seed=100)
        handed = source.hand_over(tokens, blocks)
        end = destination.wait(destination.pull(handed.grant, tokens, target).transfer_id)
        assert end.state == SUCCEEDED, end.failure
        assert [(path.data_path, path.moved_bytes) for path in end.paths] == [
            (common_pb2.DATA_PATH_COLLECTIVE, end.total_bytes)
        ]
        assert end.paths[0].why.startswith("Gloo, over TCP")
        assert destination.read(target) == written

        key, written = new_key(), source.write(blocks, seed + 10)
        reserved = reserve(destination, key, tokens, target)
        register(source, reserved.grant)
        finish(source, key, tokens, blocks)
        end = destination.wait(reserved.transfer.transfer_id)
        assert end.state == SUCCEEDED, end.failure
        assert destination.read(target) == written
        assert destination.read(bystanders) == kept
        for engine in far_apart:
            engine.reset()
