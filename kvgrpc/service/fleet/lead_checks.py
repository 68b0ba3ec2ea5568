"""Health checks of leads: whether each serves, and whether it is the engine that its entry names.

An entry that names a foreign address, engine id or incarnation is never healthy, because the lead that answers there
says who it is. With TLS the lead's certificate has to be that of the address, or of the engine id where a setting says
which name such a certificate has.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.config_fleet import ENGINE_ID
from kvgrpc.errors import Reason, Unavailable, note
from kvgrpc.fleet.directory import Directory, HealthCheck, LeadAnswer
from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.fleet.history import EngineRow
from kvgrpc.open_files import unreserved
from kvgrpc.service.fleet.entry_messages import entry_from_proto
from kvgrpc.v1 import handshake_pb2, handshake_pb2_grpc

ANSWER_S = 1.5
"""Deadline of a check, in seconds; shorter than the follower's, which would not know what was waited for."""
CHANNELS_MAX = 4_096
"""Maximum number of connections to leads that are kept between checks: one for each entry of a directory. They take at
most half of the files that the process may open.
"""
WAITING_SHARE = 1 / 16
"""Load that each transfer adds which waits for its turn."""
TAKES_WORK = (handshake_pb2.ADMISSION_OPEN, handshake_pb2.ADMISSION_OVERLOADED)
"""States of admission in which an engine is chosen."""

IN_A_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
"""Engine ids that may be a part of a certificate's name."""
_Connected = tuple[str, str, str]
"""Key of an entry, its address, and the name of the certificate there."""


class LeadChecks:
    """Checks for one reader. `may_dial` says which addresses may be called at all: an entry names any. `connect` takes
    an address and the name of the certificate there; the name is empty where it is the address's own.
    """

    def __init__(
        self,
        connect: Callable[[str, str], grpc.aio.Channel],
        may_dial: Callable[[str], bool],
        certificate_name: str = "",
    ) -> None:
        """`certificate_name` has `ENGINE_ID` in it, or is empty."""
        self._connect, self._may_dial, self._certificate_name = connect, may_dial, certificate_name
        self._channels: OrderedDict[_Connected, grpc.aio.Channel] = OrderedDict()
        """Connections: no entry disturbs the checks of another one, and none has the connection of another name."""
        self._ends: dict[_Connected, asyncio.Task[None]] = {}
        """Waits for the ends of connections over which a lead has answered."""

    async def ask(self, directory: Directory, check: HealthCheck) -> bool:
        """Returns whether the lead serves as the engine that its entry names. Tells the directory its load, or why."""
        answer = await self._answer(check)
        directory.heard(check, answer, asyncio.get_running_loop().time())
        if answer.why:
            await self._leave(self._of(check))  # the next connection has the certificate of then
        elif (of := self._of(check)) not in self._ends and of in self._channels:
            self._ends[of] = asyncio.create_task(self._await_end(of, directory, check))
        return not answer.why

    async def introduce(self, address: str) -> EngineEntry:
        """Returns the entry that the lead at an address has of itself. Raises Unavailable if there is none."""
        why = f"{address} is not on this server's dial list (setting dial_allow)"
        if self._may_dial(address):
            channel, request = await self._channel(("", address, "")), handshake_pb2.GetCapabilitiesRequest()
            try:
                asked = handshake_pb2_grpc.HandshakeServiceStub(channel).GetCapabilities(request, timeout=ANSWER_S)
                found = await asked
                if found.HasField("entry"):
                    taken = found.admission in TAKES_WORK
                    return replace(entry_from_proto(found.entry), draining=not taken)
                why = f"{address} has no engine"
            except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
                await self._leave(("", address, ""))
                why = f"{address} does not answer: {_said(error)}"
        raise Unavailable(Reason.PEER_UNREACHABLE, why)

    def channel_of(self, row: EngineRow) -> grpc.aio.Channel | None:
        """Returns the connection over which the lead of an entry has answered; None: there is none now, or there are so
        many that none is kept.
        """
        of = row.key, row.entry.addresses[0], self._name_of(row.entry.engine_id)
        return self._channels.get(of) if of in self._ends and len(self._ends) < _most() else None

    async def close(self) -> None:
        for of in list(self._channels):
            await self._leave(of)

    async def _answer(self, check: HealthCheck) -> LeadAnswer:
        if not self._may_dial(check.address):
            return LeadAnswer(why=f"{check.address} is not on this server's dial list (setting dial_allow)")
        if self._certificate_name and not IN_A_NAME.fullmatch(check.engine_id):
            return LeadAnswer(why=note(f"engine id {check.engine_id} is no part of a certificate's name"))
        channel = await self._channel(self._of(check))
        try:
            async with asyncio.timeout(ANSWER_S):
                health, engine = await asyncio.gather(
                    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()),
                    handshake_pb2_grpc.HandshakeServiceStub(channel).GetEngine(handshake_pb2.GetEngineRequest()),
                )
        except TimeoutError:
            return LeadAnswer(why=f"{check.address} has not answered within {ANSWER_S:g} s")
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise
            return LeadAnswer(why=note(f"{check.address} does not answer: {_said(error)}"))
        return _judged(check, health, engine)

    async def _await_end(self, of: _Connected, directory: Directory, check: HealthCheck) -> None:
        """Has the engine checked once its connection ends. A dead one would be chosen until its next check."""
        ready, channel = grpc.ChannelConnectivity.READY, self._channels[of]
        while channel.get_state() is ready:
            await channel.wait_for_state_change(ready)
        self._ends.pop(of, None)
        directory.doubted(check, asyncio.get_running_loop().time())

    def _of(self, check: HealthCheck) -> _Connected:
        return check.key, check.address, self._name_of(check.engine_id)

    def _name_of(self, engine_id: str) -> str:
        return self._certificate_name.replace(ENGINE_ID, engine_id)

    async def _channel(self, of: _Connected) -> grpc.aio.Channel:
        channel = self._channels.get(of)
        if channel is None:
            channel = self._channels[of] = self._connect(of[1], of[2])
        self._channels.move_to_end(of)
        if len(self._channels) > _most():
            await self._leave(next(iter(self._channels)))
        return channel

    async def _leave(self, of: _Connected) -> None:
        end, channel = self._ends.pop(of, None), self._channels.pop(of, None)
        if end is not None:
            end.cancel()
        if channel is not None:
            await channel.close()


def _most() -> int:
    """Returns the number of connections that are kept at most."""
    return min(CHANNELS_MAX, unreserved() // 2)


def load_of(status: handshake_pb2.EngineStatus) -> float:
    """Returns the load of an engine: the share of blocks in use in its fullest group, and its transfers that wait."""
    used = [
        1.0 - min(group.free_block_count + group.soft_block_count, group.block_count) / group.block_count
        for group in status.groups
        if group.block_count
    ]
    return max(used, default=0.0) + status.waiting_turn_count * WAITING_SHARE


def _judged(
    check: HealthCheck, health: health_pb2.HealthCheckResponse, engine: handshake_pb2.GetEngineResponse
) -> LeadAnswer:
    """Returns what an answer says of the engine that was asked for."""
    there = engine.header
    if there.engine_id != check.engine_id or check.incarnation not in (0, there.incarnation):
        return LeadAnswer(
            why=note(f"at {check.address} answers engine {there.engine_id}, incarnation {there.incarnation}")
        )
    if health.status != health_pb2.HealthCheckResponse.SERVING:
        why = engine.status.admission_reason or "its health is not SERVING"
        return LeadAnswer(why=note(f"{check.address} does not serve: {why}"))
    return LeadAnswer(load_of(engine.status), engine.status.admission in TAKES_WORK)


def _said(error: BaseException) -> str:
    return f"{error.code().name} {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else "the call was ended"
