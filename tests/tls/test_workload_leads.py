"""Leads and clients whose TLS comes from a SPIFFE Workload API: they meet, and go on while what they have changes."""

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from kvgrpc import workload_api
from kvgrpc.client import Client, Credentials, connect
from kvgrpc.config import Config, PoolConfig
from kvgrpc.config_security import TlsConfig
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import InvalidRequest, Reason, Unavailable
from kvgrpc.server import Server
from kvgrpc.service import file_watch
from tests.service.engines import SMALL_POOL, ServeProcess
from tests.tls.agent import Agent, answer, svid, until
from tests.tls.authority import Authority
from tests.tls.pulls import pull

CA, OTHER = Authority(), Authority("another trust domain")
SMALL = PoolConfig(layers=2, kv_heads=1, head_dim=8, blocks=64)
PARTIES = ("p", "d", "router")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes what an agent gives into use at once."""
    monkeypatch.setattr(file_watch, "LOOK_S", 0.05)
    monkeypatch.setattr(workload_api, "PAUSE_S", 0.02)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[dict[str, Agent]]:
    """The agent of each party. All give identities of one trust domain."""
    with ExitStack() as stack:
        made = {}
        for name in PARTIES:
            made[name] = Agent(tmp_path / f"{name}.sock")
            made[name].start()
            stack.callback(made[name].stop)
            made[name].give(answer(svid(CA, tmp_path / name, name)))
        stack.callback(_forget_shared, made["router"])
        yield made


def _forget_shared(agent: Agent) -> None:
    """Ends what the clients of this process share."""
    if workload_api.shared.cache_info().currsize:
        workload_api.shared(agent.address).close()
    workload_api.shared.cache_clear()


@asynccontextmanager
async def serving(agent: Agent, engine_id: str) -> AsyncIterator[Server]:
    """Serves an engine with the identity that the agent gives."""
    config = Config(
        listen="127.0.0.1:0", advertise="localhost:0", engine_id=engine_id, pool=SMALL, data_paths=("shm",),
        tls=TlsConfig(workload_api=agent.address), limits=Limits(peer_grace_s=2.0),
    )  # fmt: skip
    server = Server(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        agent.wait_for(lambda one: one.open == 0)


def caller(server: Server, agent: Agent) -> Client:
    """Returns a client with the identity that the agent gives."""
    return connect(server.address, credentials=Credentials(workload_api=agent.address))


async def test_trust_and_identities_change_under_pulls_and_none_is_lost(
    agents: dict[str, Agent], tmp_path: Path
) -> None:
    """First both leads trust the next CA, then they have certificates of it, then they trust the old one no more."""
    theirs = OTHER.certificate.public_bytes(Encoding.DER)
    ours = CA.certificate.public_bytes(Encoding.DER)
    async with serving(agents["p"], "p") as p, serving(agents["d"], "d") as d:
        async with caller(p, agents["router"]) as at_p, caller(d, agents["router"]) as at_d:
            over = False

            async def pulls() -> int:
                for count in itertools.count():
                    if over:
                        return count
                    await pull(at_p, at_d)
                raise AssertionError

            running = [asyncio.create_task(pulls()) for _ in range(3)]
            for step in range(1, 4):
                for server, name in ((p, "p"), (d, "d")):
                    authority = CA if step == 1 else OTHER
                    federated = [{"other.test": theirs}, {"old.test": ours}, {}][step - 1]
                    given = svid(authority, tmp_path / name, name)
                    agents[name].give(answer(given, federated=federated))
                    assert server.tls is not None
                    async with asyncio.timeout(20):
                        while server.tls.changes < step:  # noqa: ASYNC110 - a thread looks at the files
                            await asyncio.sleep(0.01)
            over = True
            assert all(count > 0 for count in await asyncio.gather(*running))
        agents["router"].give(answer(svid(OTHER, tmp_path / "router", "router")))
        until(lambda: workload_api.shared(agents["router"].address).updates == 2)
        async with caller(p, agents["router"]) as at_p, caller(d, agents["router"]) as at_d:
            await pull(at_p, at_d)


async def test_a_lead_of_another_trust_domain_is_met_if_both_federate_and_refused_otherwise(
    agents: dict[str, Agent], tmp_path: Path
) -> None:
    theirs, ours = (one.certificate.public_bytes(Encoding.DER) for one in (OTHER, CA))
    foreign = svid(OTHER, tmp_path / "foreign", "d")
    agents["d"].give(answer(foreign, federated={"ours.test": ours}))
    async with serving(agents["d"], "d") as d:
        async with serving(agents["p"], "p") as p, caller(p, agents["router"]) as at_p:
            with pytest.raises(Unavailable) as refused:
                await at_p.connect_peer(d.address)
            assert refused.value.reason is Reason.PEER_UNREACHABLE
        federated = {"theirs.test": theirs}
        for name in ("p", "router"):
            agents[name].give(answer(svid(CA, tmp_path / name, name), federated=federated))
        until(lambda: workload_api.shared(agents["router"].address).updates == 2)
        async with (
            serving(agents["p"], "p") as p, caller(p, agents["router"]) as at_p, caller(d, agents["router"]) as at_d,
        ):  # fmt: skip
            await pull(at_p, at_d)


async def test_a_client_that_is_refused_names_its_agent(agents: dict[str, Agent], tmp_path: Path) -> None:
    ours = CA.certificate.public_bytes(Encoding.DER)
    agents["router"].give(answer(svid(OTHER, tmp_path / "foreign", "router"), federated={"ours.test": ours}))
    async with serving(agents["p"], "p") as p, caller(p, agents["router"]) as at_p:
        with pytest.raises(Unavailable) as refused:
            await at_p.capabilities()
        assert f"refuses this client's certificate by {agents['router'].address}" in refused.value.metadata["tls"]


async def test_a_server_and_a_client_without_an_agent_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_api, "START_S", 0.1)
    nobody = f"unix://{tmp_path}/none.sock"
    with pytest.raises(InvalidRequest, match="gave no identity"):
        Server(Config(listen="127.0.0.1:0", tls=TlsConfig(workload_api=nobody)))
    with pytest.raises(InvalidRequest, match="gave no identity"):
        connect("localhost:1", credentials=Credentials(workload_api=nobody))
    assert Credentials.from_environment({"KVGRPC_TLS_WORKLOAD_API": nobody}) == Credentials(workload_api=nobody)
    with pytest.raises(InvalidRequest, match="leave it out"):
        connect("localhost:1", credentials=Credentials(dir=tmp_path, workload_api=nobody))


def test_commands_have_their_identity_of_an_agent_too(agents: dict[str, Agent], tmp_path: Path) -> None:
    flags = ("--listen", "127.0.0.1:0", "--advertise", "localhost:0", *SMALL_POOL)
    variable = "KVGRPC_TLS_WORKLOAD_API"
    server = ServeProcess(tmp_path / "lead", *flags, environment={variable: agents["p"].address}, fresh=True)
    try:
        address = server.wait_ready()["address"]
        for agent, code in ((agents["router"].address, 0), ("", 1)):
            done = subprocess.run(
                [sys.executable, "-m", "kvgrpc", "status", address],
                env=os.environ | {variable: agent}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert (done.returncode, "speaks TLS, and this client plain text" in done.stderr) == (code, code == 1)
    finally:
        server.end()
