"""Process of an engine, its scheduler or a worker, that a test kills or stops. JSON lines drive it.

    {"op": "schedule", "socket_path", "private"}    attaches as the scheduler; the ticket for the worker
    {"op": "launch", "flags", "private", "environment"}      as "schedule", with a lead of its own
    {"op": "lead"}                   its lead's process and address; of the next one when there is one
    {"op": "work", "ticket", "private", "path", "environment", "bytes_per_s"}     attaches as the worker of rank 0
    {"op": "hand_over", "name", "blocks", "tokens"}   the grant
    {"op": "pull", "name", "grant", "tokens"}       nothing; the transfer is called `name` from now on
    {"op": "start", "name", "blocks"}
    {"op": "reserve", "name", "blocks", "tokens"}     the grant
    {"op": "push", "name", "key", "tokens", "grant"}
    {"op": "part", "name", "blocks", "layers", "last"}
    {"op": "events", "wait_s"}       [[kind, name, reason], ...]; all of this life; "LeadDied" is the last
    {"op": "id", "name"}             the transfer's id, as soon as it is known
    {"op": "paint", "blocks", "value"}      every byte of the blocks, in the worker
    {"op": "see", "blocks"}          the values that the bytes have
    {"op": "leave"}                  closes the engine and the rank; "" or why the rank cannot be closed

One process imports the modules once, and forks one actor for each descriptor that it is sent.
"""

import json
import os
import socket
import time
from typing import Any

import numpy as np

from kvgrpc.engine import Engine, LeadDied, Rank, RankTicket, content
from kvgrpc.engine.transfers.handles import Handle, HandOver, Pull
from kvgrpc.engine.transfers.pushes import Push, Reservation
from kvgrpc.errors import KVGrpcError
from tests.engine.forked import fork_for_each
from tests.engine.made import BLOCKS, LAYER_BYTES, LAYERS, layout

ANSWER_S = 10.0


class Actor:
    """The engine or rank of one process, its transfers by name, and the events of its life."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.rank: Rank | None = None
        self._memory: Any = None
        self._handles: dict[str, Handle] = {}
        self._events: list[list[str]] = []

    def schedule(self, line: dict[str, Any]) -> dict[str, Any]:
        self.leave({})
        return self._begun(Engine.attach(line["socket_path"], pool=layout(), private_memory=line["private"]))

    def launch(self, line: dict[str, Any]) -> dict[str, Any]:
        self.leave({})
        os.environ.update(line["environment"])
        return self._begun(Engine.launch(pool=layout(), private_memory=line["private"], flags=line["flags"]))

    def lead(self, _: dict[str, Any]) -> list[Any]:
        return [self._engine.lead_pid, self._engine.address]

    def work(self, line: dict[str, Any]) -> str:
        self.leave({})
        os.environ.update(line["environment"])  # UCX reads it once, with the first rank
        row = line["ticket"]
        ticket = RankTicket(row["path"], bytes.fromhex(row["secret"]), row["memory_bytes"], row["comes_back_s"])
        if line["private"]:
            self._memory = np.zeros(LAYERS * BLOCKS * LAYER_BYTES, np.uint8)
            paths, limit = (line["path"],), line["bytes_per_s"]
            self.rank = Rank(ticket, 0, [self._memory], data_paths=paths, bandwidth_limit_bytes_per_s=limit)
        else:
            self.rank = Rank(ticket)
            self._memory = self.rank.memory
        return "attached"

    def hand_over(self, line: dict[str, Any]) -> str:
        made = self._engine.finished_blocks(line["blocks"], content(line["tokens"]), transfer_key=os.urandom(16))
        self._engine.flush()
        self._named(line, made)
        return made.grant.hex()

    def pull(self, line: dict[str, Any]) -> str:
        self._named(line, self._engine.pull(bytes.fromhex(line["grant"]), content(line["tokens"])))
        self._engine.flush()
        return ""

    def start(self, line: dict[str, Any]) -> str:
        handle = self._handles[line["name"]]
        assert isinstance(handle, Pull)
        if not handle.over:
            handle.start(line["blocks"])
            self._engine.flush()
        return ""

    def reserve(self, line: dict[str, Any]) -> str:
        key, prompt = bytes.fromhex(line["key"]), content(line["tokens"])
        made = self._named(line, self._engine.reserve(line["blocks"], prompt, transfer_key=key))
        assert isinstance(made, Reservation)
        self.id(line)
        return made.grant.hex()

    def push(self, line: dict[str, Any]) -> str:
        made = self._named(line, self._engine.push(content(line["tokens"]), transfer_key=bytes.fromhex(line["key"])))
        assert isinstance(made, Push)
        made.register(bytes.fromhex(line["grant"]))
        self._engine.flush()
        return ""

    def part(self, line: dict[str, Any]) -> str:
        handle = self._handles[line["name"]]
        assert isinstance(handle, Push)
        if not handle.over:
            handle.finished(line["blocks"], layers=line["layers"] and tuple(line["layers"]), last=line["last"])
            self._engine.flush()
        return ""

    def events(self, line: dict[str, Any]) -> list[list[str]]:
        """Returns all events of this life, in order."""
        names = {handle: name for name, handle in self._handles.items()}
        try:
            for event in self._engine.poll(line["wait_s"]):
                reason = getattr(event, "reason", None)
                self._events.append([type(event).__name__, names[event.transfer], str(reason or "")])
        except LeadDied:
            self._events.append(["LeadDied", "", ""])
        return self._events

    def id(self, line: dict[str, Any]) -> str:
        handle, until = self._handles[line["name"]], time.monotonic() + ANSWER_S
        while not handle.transfer_id and time.monotonic() < until:
            self.events({"wait_s": 0.01})
        return handle.transfer_id

    def paint(self, line: dict[str, Any]) -> str:
        self._view[:, line["blocks"]] = line["value"]
        return ""

    def see(self, line: dict[str, Any]) -> list[int]:
        return [int(value) for value in np.unique(self._view[:, line["blocks"]])]

    def leave(self, _: dict[str, Any]) -> str:
        """Closes the engine and the rank, if there are any. Returns "" or why the rank cannot be closed."""
        if self.engine is not None:
            self.engine.close()
        if self.rank is not None:
            try:
                self.rank.close()
            except KVGrpcError as error:  # a data path may still use the memory
                return str(error)
        self.engine = self.rank = None
        return ""

    def _begun(self, engine: Engine) -> dict[str, Any]:
        self.engine, self._handles, self._events = engine, {}, []
        ticket = engine.ticket
        own = {"path": ticket.socket_path, "secret": ticket.secret.hex()}
        return {**own, "memory_bytes": ticket.memory_bytes, "comes_back_s": ticket.comes_back_s}

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    @property
    def _view(self) -> Any:
        return self._memory[: LAYERS * BLOCKS * LAYER_BYTES].reshape(LAYERS, BLOCKS, LAYER_BYTES)

    def _named(self, line: dict[str, Any], handle: Any) -> Any:
        assert isinstance(handle, HandOver | Pull | Push | Reservation)
        self._handles[line["name"]] = handle
        return handle


def serve(fd: int) -> None:
    """Answers one test's lines until the test hangs up."""
    actor = Actor()
    with socket.socket(fileno=fd) as test, test.makefile("r") as lines:
        for text in lines:
            line = json.loads(text)
            try:
                answer = getattr(actor, line["op"])(line)
            except LeadDied:
                answer = "LeadDied"
            test.sendall(json.dumps(answer).encode() + b"\n")
    actor.leave({})


if __name__ == "__main__":
    fork_for_each(serve)
