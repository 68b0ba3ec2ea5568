"""The whole system on five hosts: two prefill engines, two decode engines, and a hub with etcd and `kvgrpc fleet`."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from kvgrpc.client import connect_sync, name_of
from kvgrpc.v1 import admin_pb2, common_pb2, fleet_pb2, handshake_pb2
from tests.hosts import hosts
from tests.hosts.hosts import Host
from tests.hosts.switched import Network, switched
from tests.registry.etcds import MISSING, RunningEtcd
from tests.service.api import Api
from tests.service.engines import Engine, ServeProcess, wait_until
from tests.service.fleet.published import fleet

NAMES = "p1", "p2", "d1", "d2"
PREFILL, DECODE = NAMES[:2], NAMES[2:]
HUB = 4
"""Index of the host of etcd and `kvgrpc fleet`, after those of the engines."""

LIMITS = {
    "lease_ttl_s": 6.0,
    "queue_timeout_s": 8.0,
    "transfer_timeout_s": 8.0,
    "settle_timeout_s": 3.0,
    "registration_timeout_s": 12.0,
    "peer_grace_s": 3.0,
    "connect_timeout_s": 4.0,
}
"""Limits short enough that a cut is felt, and long enough for a busy machine."""
END_S = LIMITS["registration_timeout_s"] + LIMITS["queue_timeout_s"] + LIMITS["transfer_timeout_s"] + 5.0
"""Time within which every transfer has ended, whatever the network does, with some of it for the machine."""
POOL = ("--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--blocks", "2000")
START_S = 90.0
"""Timeout for a meeting of two engines that load torch on a busy machine."""
BYTES_PER_S = 200_000
"""What a rank moves. A long move takes a second or more, in which the network can be cut."""
PATHS = {"collective": ("shm,cma,nixl,collective", "^sm"), "nixl": ("shm,cma,nixl", "tcp")}
"""Data paths of all leads, and UCX_TLS, by the path that is left between hosts. UCX takes namespaces of one kernel for
one host: `sm` would read their processes. NIXL goes over TCP where UCX_TLS names it."""


class System:
    """Processes on the hosts of a network."""

    def __init__(self, folder: Path, network: Network, path: str, stack: ExitStack) -> None:
        self.network = network
        self.path = path
        self.host: Mapping[str, Host] = dict(zip(NAMES, network.hosts, strict=False))
        self.hub = network.hosts[HUB]
        self.etcd = RunningEtcd(folder / "etcd", within=self.hub.within, home=self.hub.address)
        self.etcd.start()
        stack.callback(self.etcd.end)
        processes = [self._lead(folder, name) for name in NAMES]
        for process in processes:
            stack.callback(process.end)
        here = ("--insecure", "--dial-allow", f"{hosts.NETWORK}.0/24", "--registry", f"etcd://{self.etcd.address}")
        found = stack.enter_context(fleet(folder / "fleet", *here, within=self.hub.within, home=self.hub.address))
        self.router = found["address"]
        self.engines = {name: Engine(process) for name, process in zip(NAMES, processes, strict=True)}
        for engine in self.engines.values():
            stack.callback(engine.api.close)
        wait_until(lambda: self.states(self.router) == dict.fromkeys(NAMES, "healthy"))
        for prefill in PREFILL:
            for decode in DECODE:  # ranks load torch when they meet for the first time, which a busy machine may miss
                wait_until(lambda pair=(prefill, decode): self._met(*pair), START_S)  # type: ignore[misc]

    def _lead(self, folder: Path, name: str) -> ServeProcess:
        host, (data_paths, transports) = self.host[name], PATHS[self.path]
        settings = [
            f"bandwidth_limit_bytes_per_s = {BYTES_PER_S}",
            "[limits]", *(f"{limit} = {value}" for limit, value in LIMITS.items()),
            "[fleet]", f'registry = "etcd://{self.etcd.address}"', "entry_ttl_s = 3", "check_every_s = 0.5",
            f'role = "{"prefill" if name in PREFILL else "decode"}"', f'host = "{host.name}"',
        ]  # fmt: skip
        return ServeProcess(
            folder / name, "--listen", f"{host.address}:0", "--engine-id", name, "--data-paths", data_paths,
            "--insecure", "--dial-allow", f"{hosts.NETWORK}.0/24", "--read-blocks", "--drain-s", "0", *POOL,
            settings="\n".join(settings), within=host.within,
            environment={"UCX_TLS": transports, "UCX_NET_DEVICES": host.device},
        )  # fmt: skip

    def _met(self, one: str, other: str) -> bool:
        request = handshake_pb2.ConnectPeerRequest(peer=common_pb2.PeerAddress(address=self.engines[other].address))
        try:
            self.engines[one].api.handshake.ConnectPeer(request)
        except grpc.RpcError:
            return False
        return True

    # -- the fleet

    def listed(self, address: str) -> fleet_pb2.ListEnginesResponse:
        """Returns the engines that a server of the fleet knows."""
        api = Api(address)
        try:
            return api.fleet.ListEngines(fleet_pb2.ListEnginesRequest())
        finally:
            api.close()

    def states(self, address: str) -> dict[str, str]:
        return {one.engine_id: name_of(fleet_pb2.EngineState, one.state) for one in self.listed(address).engines}

    def stale(self, address: str) -> bool:
        """Returns whether a server of the fleet says that its list may be old."""
        return self.listed(address).HasField("registry_silence")

    def picked(self, address: str) -> tuple[str, str]:
        """Returns the pair for a request, as a server of the fleet chooses it; empty names if there is none."""
        with connect_sync(address) as client:
            pair = client.fleet().pick_pair()
            return pair.prefill.engine.engine_id, pair.decode.engine.engine_id

    # -- the network

    def restore(self) -> None:
        """Makes the network whole, and waits until the whole fleet is healthy and no engine has anything left."""
        self.network.set()
        wait_until(lambda: self.states(self.router) == dict.fromkeys(NAMES, "healthy"), what=self.left)
        wait_until(lambda: not self.left(), what=self.left)

    def left(self) -> dict[str, str]:
        """Returns what is in progress, pinned or in quarantine, by engine."""
        found = {}
        for name, engine in self.engines.items():
            counts = engine.api.admin.GetStatus(admin_pb2.GetStatusRequest()).counts
            held = (
                counts.pending_transfer_count, counts.active_transfer_count, counts.lease_count,
                counts.open_access_count, counts.pinned_block_count, counts.quarantined_block_count,
            )  # fmt: skip
            if any(held):
                found[name] = str(counts)
        return found


@contextmanager
def running(folder: Path, path: str) -> Iterator[System]:
    """Runs the system for the duration of the context. Skips the test where that is impossible."""
    if MISSING:
        pytest.skip(MISSING)
    with ExitStack() as stack:
        network = stack.enter_context(switched(HUB + 1))
        if isinstance(network, str):
            pytest.skip(network)
        yield System(folder, network, path, stack)
