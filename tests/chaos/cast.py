"""The players: two engines, each with a lead, a scheduler and a worker in processes of their own, and a network."""

import os
import signal
import socket
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvgrpc.core.values.limits import Limits
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, transfer_pb2
from tests.chaos.network import NAMESPACE, Proxy, set_loopback
from tests.e2e import pushing
from tests.e2e.conftest import PATHS
from tests.engine.support import Lead, Workers, ended
from tests.service.api import Api
from tests.service.engines import HOME, wait_until

# The lease bounds every wait for an engine that stands still.
LIMITS = Limits(**tomllib.loads(pushing.LIMITS)["limits"], lease_ttl_s=3.0, lease_cap_s=4.0)
WRITTEN = replace(LIMITS, quarantine_share=0.1, rekey_interval_s=0.5)
"""Limits where the source writes: one transfer's quarantine exceeds the share, so a re-key starts by itself."""
PATIENT = replace(
    LIMITS, peer_grace_s=20.0, queue_timeout_s=20.0, transfer_timeout_s=20.0, settle_timeout_s=20.0,
    registration_timeout_s=20.0, lease_ttl_s=20.0, lease_cap_s=40.0,
)  # fmt: skip
"""Limits that do not run out while a process stands still for a moment."""
SLOW_BYTES_PER_S = 60_000
"""Bandwidth at which 16 blocks of 2 KiB take half a second: long enough to interrupt the move."""
MEMBERS = {
    "lead": ("lead",),
    "scheduler": ("scheduler",),
    "worker": ("worker",),
    "engine": ("scheduler", "worker"),
    "lead and engine": ("lead", "scheduler", "worker"),
}
"""Possible victims, and the processes of each."""


@dataclass(frozen=True)
class Setting:
    """Settings of one play."""

    path: str
    limits: Limits = LIMITS
    source_writes: bool = False
    bytes_per_s: int = SLOW_BYTES_PER_S

    @property
    def text(self) -> str:
        """Settings file of a lead."""
        limits = [f"{one.name} = {getattr(self.limits, one.name)}" for one in fields(Limits)]
        return "\n".join([f"source_writes = {str(self.source_writes).lower()}", "[limits]", *limits])

    @property
    def flags(self) -> tuple[str, ...]:
        return (*PATHS[self.path][0], "--bandwidth-limit-bytes-per-s", str(self.bytes_per_s))


class ProxiedLead(Lead):
    """A lead whose advertised address differs from the address at which the test calls it."""

    def __init__(self, folder: Path, name: str, listen: str, *flags: str, settings: str) -> None:
        self._listen = listen
        super().__init__(folder, name, "--listen", listen, *flags, settings=settings)

    def wait_ready(self) -> "ProxiedLead":
        self.process.wait_ready()
        self.api = Api(self._listen)
        return self


class Player:
    """One of the two engines: P or D."""

    def __init__(self, folder: Path, name: str, setting: Setting, actors: Workers) -> None:
        self.name = name
        self._folder, self._setting, self._actors = folder, setting, actors
        self._private = setting.path != "shm"
        self._lives = 0
        self._stopped: set[int] = set()
        self._held = 0
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
        setting, where = self._setting, f"{self.proxy.target[0]}:{self.proxy.target[1]}"
        folder = self._folder / f"{self.name}{self._lives}"
        folder.mkdir()
        flags = ("--advertise", self.proxy.address, *setting.flags)
        self.lead: Lead = ProxiedLead(folder, self.name, where, *flags, settings=setting.text)

    def attach(self) -> None:
        """Starts a new life of the engine."""
        ticket = self._attach_scheduler()
        flags, environment = PATHS[self._setting.path]
        work = {"private": self._private, "path": flags[-1], "environment": environment}
        work["bytes_per_s"] = self._setting.bytes_per_s
        assert self.worker.ask(op="work", ticket=ticket, **work) == "attached"

    def _attach_scheduler(self) -> Any:
        """Attaches the scheduler and returns the ticket for its worker."""
        return self.scheduler.ask(op="schedule", socket_path=self.lead.socket_path, private=self._private)

    # -- faults

    def cut(self) -> None:
        """Cuts the player and its peers off from each other, and from the test if the whole network is cut."""
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
        """Returns the id of the process that plays this part."""
        if part == "lead":
            return self._pid_of_lead()
        return {"scheduler": self.scheduler, "worker": self.worker}[part].pid

    def _pid_of_lead(self) -> int:
        return self.lead.process.pid

    def kill(self, victim: str) -> None:
        """Kills all processes of the victim at once, and waits until they have ended."""
        pids = [self.pids(part) for part in MEMBERS[victim]]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pidfd in pidfds:
            assert ended(pidfd)
            os.close(pidfd)
        self._killed.update(MEMBERS[victim])
        self._stopped.difference_update(pids)

    def stop(self, victim: str) -> None:
        for part in MEMBERS[victim]:
            self._stopped.add(self.pids(part))
            os.kill(self.pids(part), signal.SIGSTOP)

    def hold(self) -> None:
        """Stops its lead until `let_go`, so that a step lasts."""
        self._held = self.pids("lead")
        os.kill(self._held, signal.SIGSTOP)

    def let_go(self) -> None:
        """Continues its lead, if it was held and was not killed or stopped since."""
        if self._held and self.sound("lead"):
            os.kill(self._held, signal.SIGCONT)
        self._held = 0

    def resume(self) -> None:
        """Continues all stopped processes."""
        for pid in self._stopped:
            os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def revive(self, *, fresh: bool = False) -> bool:
        """Restarts the killed processes at the same address and, if the engine's life is over, begins a new one. With
        `fresh`, the worker gets a new process. Returns True if a new life began.
        """
        if "lead" in self._killed:
            self.lead.api.close()
            self._begin_lead()
            self.lead.wait_ready()
        for part in {"scheduler", "worker"} & self._killed:
            getattr(self, part).close()
            setattr(self, part, self._actors.make())
        gone = bool(self._killed) or self.lost(self.ask("events", wait_s=0.0))
        self._killed.clear()
        if gone:
            self.leave(fresh=fresh)
            self.lead.wait_no_engine()
            self.attach()
        return gone

    def leave(self, *, fresh: bool = False) -> None:
        """Ends the engine's life. Replaces the worker's process if `fresh`, or while a data path may use its memory."""
        self.scheduler.ask(op="leave")
        if fresh or self.worker.ask(op="leave"):
            self.worker.kill()
            self.worker.close()
            self.worker = self._actors.make()

    # -- state

    def sound(self, *parts: str) -> bool:
        """Checks that none of these parts was killed or stands still."""
        return not any(part in self._killed or self.pids(part) in self._stopped for part in parts)

    def lost(self, events: list[list[str]]) -> bool:
        """Checks whether the engine was told that its life is over. Fails if none of its processes was killed."""
        found = ["LeadDied", "", ""] in events
        assert self._killed or not found, f"{self.name} lost its session: {events}"
        return found

    def quarantine(self) -> list[admin_pb2.Pin]:
        """Returns the pins in quarantine, and the pins under which its own postings still read for an ended push. Fails
        if a quarantine pin does not name its missing proof; the other pins are recognised by that name.
        """
        pins = self.lead.api.admin.ListPins(admin_pb2.ListPinsRequest()).pins
        found = [pin for pin in pins if pin.kind == admin_pb2.PIN_KIND_QUARANTINE or pin.missing_proof]
        assert all(pin.missing_proof for pin in found), found
        return found

    def meet(self, other: "Player") -> None:
        """Makes a handshake with another player."""
        where = common_pb2.PeerAddress(address=other.proxy.address)
        self.lead.api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=where))

    def transports(self) -> list[str]:
        """Returns the transport of each data path to its peers, as its lead reports it."""
        peers = self.lead.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
        return [path.why for peer in peers for path in peer.paths]

    def paint(self, blocks: Sequence[int], value: int) -> None:
        self.worker.ask(op="paint", blocks=list(blocks), value=value)

    def see(self, blocks: Sequence[int]) -> list[int]:
        found: list[int] = self.worker.ask(op="see", blocks=list(blocks))
        return found

    def ask(self, op: str, **request: Any) -> Any:
        """Asks the scheduler."""
        return self.scheduler.ask(op=op, **request)

    def transfer(self, name: str) -> transfer_pb2.Transfer:
        return self.lead.transfer(self.ask("id", name=name))

    def wait_at_rest(self) -> None:
        """Waits until it holds nothing and takes new work: a re-key may be under way."""

        def rests() -> bool:
            return self.lead.at_rest() and self.lead.status().admission == handshake_pb2.ADMISSION_OPEN

        wait_until(rests, what=lambda: (self.lead.status(), self.quarantine()))

    def close(self) -> None:
        self.mend()
        self.let_go()
        self.resume()
        for actor in (self.scheduler, self.worker):
            with suppress(OSError):
                actor.close()
        self.lead.close()
        self.proxy.close()


class OwnLead(Lead):
    """The current lead of a launched engine."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.api = name, Api(address)

    def close(self) -> None:
        self.api.close()


class Launched(Player):
    """A player whose lead is a child of its engine's scheduler, which restarts it. Peers reach it without a proxy."""

    _lead_pid: int

    def _begin_lead(self) -> None:
        config = self._folder / f"{self.name}.toml"
        config.write_text(self._setting.text)
        self._flags = ["--config", str(config), "--engine-id", self.name, *self._setting.flags]

    def ready(self) -> "Launched":
        self.attach()
        return self

    def _attach_scheduler(self) -> Any:
        _, environment = PATHS[self._setting.path]
        ticket = self.scheduler.ask(op="launch", flags=self._flags, private=self._private, environment=environment)
        self._know_lead()
        return ticket

    def _pid_of_lead(self) -> int:
        return self._lead_pid

    def come_back(self, *, anew: bool) -> None:
        """Waits for the new lead or, with `anew`, begins a new life of the engine."""
        self._killed.clear()
        if anew:
            self.lead.close()
            self.leave(fresh=True)
            self.attach()
            return
        before = self._lead_pid
        wait_until(lambda: self.ask("events", wait_s=0.1) is not None and self.ask("lead")[0] not in (0, before))
        self.lead.close()
        self._know_lead()

    def _know_lead(self) -> None:
        self._lead_pid, address = self.ask("lead")
        self.lead = OwnLead(self.name, address)
