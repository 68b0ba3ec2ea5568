"""Who plays: two engines, each with a lead, a scheduler and a worker in processes of their own, and a network."""

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvgrpc.v1 import admin_pb2, transfer_pb2
from tests.chaos.actor import SLOW_BYTES_PER_S
from tests.chaos.network import NAMESPACE, Proxy, set_loopback
from tests.e2e.conftest import PATHS
from tests.e2e.pushing import LIMITS
from tests.engine.support import Asked, Lead, Workers
from tests.service.api import Api
from tests.service.engines import HOME, wait_until

# What waits for an engine that stands still ends with the lease.
SETTINGS = f"{LIMITS}lease_ttl_s = 3.0\nlease_cap_s = 4.0\n"
SLOW = ("--bandwidth-limit-bytes-per-s", str(SLOW_BYTES_PER_S))


class ProxiedLead(Lead):
    """A lead that names another address to its peers than the one at which the test asks it."""

    def __init__(self, folder: Path, name: str, listen: str, *flags: str) -> None:
        self._listen = listen
        super().__init__(folder, name, "--listen", listen, *flags, settings=SETTINGS)

    def wait_ready(self) -> "ProxiedLead":
        self.process.wait_ready()
        self.api = Api(self._listen)
        return self


class Player:
    """One engine of the two: P or D."""

    def __init__(self, folder: Path, name: str, path: str, actors: Workers) -> None:
        self.name = name
        self._folder, self._path, self._actors = folder, path, actors
        self._private = path != "shm"
        self._lives = 0
        self._stopped: set[int] = set()
        self._killed: set[str] = set()
        self.reachable = True
        self.proxy = Proxy()
        with socket.create_server((HOME, 0)) as free:
            self.proxy.target = free.getsockname()
        self._begin_lead()
        self.scheduler, self.worker = actors.make(), actors.make()

    def ready(self) -> "Player":
        self.lead.wait_ready()
        self.attach()
        return self

    def _begin_lead(self) -> None:
        self._lives += 1
        flags, _ = PATHS[self._path]
        where = f"{self.proxy.target[0]}:{self.proxy.target[1]}"
        folder = self._folder / f"{self.name}{self._lives}"
        folder.mkdir()
        self.lead = ProxiedLead(folder, self.name, where, "--advertise", self.proxy.address, *flags, *SLOW)

    def attach(self) -> None:
        """Its engine begins a new life."""
        ticket = self.scheduler.ask(op="schedule", socket_path=self.lead.socket_path, private=self._private)
        flags, environment = PATHS[self._path]
        work = {"private": self._private, "path": flags[-1], "environment": environment}
        assert self.worker.ask(op="work", ticket=ticket, **work) == "attached"

    # -- what happens to it

    def cut(self) -> None:
        """Its peers do not reach it, nor it them; nor does the test, where the whole network is cut."""
        self.reachable = not NAMESPACE
        if NAMESPACE:
            set_loopback("down")
        else:
            self.proxy.cut()

    def mend(self) -> None:
        self.reachable = True
        if NAMESPACE:
            set_loopback("up")
        else:
            self.proxy.mend()

    def pids(self, part: str) -> int:
        """The process that plays that part."""
        return {"lead": self.lead.process.pid, "scheduler": self.scheduler.pid, "worker": self.worker.pid}[part]

    def kill(self, part: str) -> None:
        self._killed.add(part)
        self._stopped.discard(self.pids(part))
        if part == "lead":
            self.lead.process.kill()
            return
        actor = getattr(self, part)
        assert isinstance(actor, Asked)
        actor.kill()

    def stop(self, part: str) -> None:
        self._stopped.add(self.pids(part))
        os.kill(self.pids(part), signal.SIGSTOP)

    def resume(self) -> None:
        """What stood still goes on."""
        for pid in self._stopped:
            os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def revive(self) -> bool:
        """What was killed begins anew, at the same address; and a new life of the engine, where the old one ended.
        Whether it did.
        """
        if "lead" in self._killed:
            self.lead.api.close()
            self._begin_lead()
            self.lead.wait_ready()
        for part in {"scheduler", "worker"} & self._killed:
            getattr(self, part).close()
            setattr(self, part, self._actors.make())
        ended = bool(self._killed) or self.lost(self.ask("events", wait_s=0.0))
        self._killed.clear()
        if ended:
            self.leave()
            self.lead.wait_no_engine()
            self.attach()
        return ended

    def leave(self) -> None:
        self.scheduler.ask(op="leave")
        self.worker.ask(op="leave")

    # -- what it knows

    def sound(self, part: str) -> bool:
        """Whether it was neither killed nor stands still."""
        return part not in self._killed and self.pids(part) not in self._stopped

    def lost(self, events: list[list[str]]) -> bool:
        """Whether its engine was told that its life is over. Fails where none of its processes was killed."""
        found = ["LeadDied", "", ""] in events
        assert self._killed or not found, f"{self.name} lost its session: {events}"
        return found

    def quarantine(self) -> list[admin_pb2.Pin]:
        """Fails for one that does not say which proof is missing."""
        pins = self.lead.api.admin.ListPins(admin_pb2.ListPinsRequest()).pins
        found = [pin for pin in pins if pin.kind == admin_pb2.PIN_KIND_QUARANTINE]
        assert all(pin.missing_proof for pin in found), found
        return found

    def transports(self) -> list[str]:
        """What its bytes go by, as it says it of each peer that it reaches."""
        peers = self.lead.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
        return [path.why for peer in peers for path in peer.paths]

    def paint(self, blocks: Sequence[int], value: int) -> None:
        self.worker.ask(op="paint", blocks=list(blocks), value=value)

    def see(self, blocks: Sequence[int]) -> list[int]:
        found: list[int] = self.worker.ask(op="see", blocks=list(blocks))
        return found

    def ask(self, op: str, **request: Any) -> Any:
        """Of the scheduler."""
        return self.scheduler.ask(op=op, **request)

    def transfer(self, name: str) -> transfer_pb2.Transfer:
        return self.lead.transfer(self.ask("id", name=name))

    def wait_at_rest(self) -> None:
        wait_until(self.lead.at_rest, what=lambda: (self.lead.status(), self.quarantine()))

    def close(self) -> None:
        self.mend()
        self.resume()
        for actor in (self.scheduler, self.worker):
            with suppress(OSError):
                actor.close()
        self.lead.close()
        self.proxy.close()
