"""Replies of a peer to a lead, as heavy as possible: no memory is kept, and nobody waits long."""

import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from random import Random

import grpc
import pytest

from kvgrpc.v1 import handshake_pb2
from tests.fuzz import inside
from tests.fuzz.conftest import Run
from tests.fuzz.inside import State
from tests.fuzz.liar import REPLIES, SHORT_TTL_S, Liar
from tests.fuzz.messages import Known
from tests.fuzz.target import LIMITS
from tests.fuzz.weights import Scales
from tests.service.conftest import starting
from tests.service.engines import Engine
from tests.service.values import prompt

TOKENS = prompt(40)
SHARE = 0.01
SETTLED_S = 0.05
"""Time for what a life of the peer still sends after its transfer, in seconds."""


class Victim:
    """A lead that pulls from peers whose replies are heavy."""

    def __init__(self, engine: Engine, state: State) -> None:
        self.engine, self.state = engine, state
        self._scales = Scales(engine.process.pid, state)
        known = Known()
        known.harvest(engine.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest()))
        self._liar = Liar(engine, known)  # type: ignore[abstract]
        self._blocks = engine.allocate(3)

    def input(self, random: Random) -> None:
        """Pulls from a new life of a peer, with one heavy reply."""
        liar, rpc, seed = self._liar, random.choice(REPLIES), random.random()

        def give() -> bool:
            liar.live_anew(secrets.randbits(52) + 1, rpc, seed)
            self._pull(liar, waits=rpc in ("RenewLeases", "CloseAccess"))
            time.sleep(SETTLED_S)
            return True

        self._scales.begin()
        give()
        self.state()
        self._scales.end(f"reply to {rpc}", liar.sent_bytes, give)

    def _pull(self, liar: Liar, *, waits: bool) -> None:
        engine = self.engine
        try:
            pulled = engine.pull(liar.grant(40), TOKENS, None if waits else self._blocks)
            if waits:
                time.sleep(SHORT_TTL_S)
                engine.cancel(pulled.transfer_id)
            engine.wait(pulled.transfer_id)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:  # the short history has forgotten a failed pull
                raise

    def check_sound(self) -> None:
        """Checks that a pull from a peer without heavy replies ends and the engine is alive."""
        liar = self._liar
        liar.live_anew(secrets.randbits(52) + 1, "", 0.0)
        pulled = self.engine.pull(liar.grant(40), TOKENS, self._blocks)
        assert self.engine.wait(pulled.transfer_id).transfer_id == pulled.transfer_id
        self.engine.check_alive()

    def close(self) -> None:
        self._liar.close()
        self.engine.reset()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with starting(tmp_path_factory.mktemp("replies")) as start:
        (engine,) = start((), settings=f"checksums = true\n{LIMITS}", **inside.ENVIRONMENT)
        with closing(State(engine.process.pid)) as state:
            made = Victim(engine, state)
            yield made
            made.close()


def test_no_reply_keeps_memory_or_holds_up_the_loop(victim: Victim, run: Run) -> None:
    run(victim.input, SHARE)
    victim.check_sound()
