"""An engine in a process that a test kills. It attaches to a lead or launches its own, and is driven by JSON lines.

engine_process FD SOCKET_PATH      attaches; first line: {"incarnation", "lead": 0}
engine_process FD launch           launches its own lead; first line: {"incarnation", "lead": PID}
{"op": "hand_over", "blocks", "tokens"}    answers the grant, as kv_transfer_params
{"op": "pull", "grant", "tokens", "blocks"}    answers the open transfer's id; without blocks it waits for them
{"op": "poll"}                             polls once, then answers the PID of its own lead
{"op": "fork"}                             answers the PID of a child that lives on until the test kills it
"""

import json
import os
import signal
import socket
import sys
from typing import Any

from kvgrpc.core.values.grants import from_json
from kvgrpc.engine import Engine, Rank, content
from tests.engine.made import layout


class Process:
    """The engine and its only rank."""

    def __init__(self, where: str) -> None:
        self.engine = (
            Engine.launch(pool=layout(), flags=["--data-paths", "shm"])
            if where == "launch"
            else Engine.attach(where, pool=layout())
        )
        self.rank = Rank(self.engine.ticket)

    def hand_over(self, line: dict[str, Any]) -> dict[str, Any]:
        handover = self.engine.finished_blocks(line["blocks"], content(line["tokens"]), transfer_key=os.urandom(16))
        self.engine.flush()
        while not handover.transfer_id:
            self.engine.poll(0.01)
        return handover.kv_transfer_params

    def pull(self, line: dict[str, Any]) -> str:
        pull = self.engine.pull(from_json(line["grant"]), content(line["tokens"]))
        if line["blocks"]:
            pull.start(line["blocks"])
        assert self.engine.poll(10.0)
        return pull.transfer_id

    def poll(self, _: dict[str, Any]) -> int:
        self.engine.poll(0.01)
        assert self.engine._lead is not None
        return self.engine._lead.pid

    def fork(self, _: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return pid


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as test, test.makefile("r") as lines:
        process = Process(sys.argv[2])
        lead = process.engine._lead.pid if process.engine._lead is not None else 0
        hello: Any = {"incarnation": process.engine.incarnation, "lead": lead}
        test.sendall(json.dumps(hello).encode() + b"\n")
        for text in lines:
            line = json.loads(text)
            test.sendall(json.dumps(getattr(process, line["op"])(line)).encode() + b"\n")
        process.engine.close()
        process.rank.close()


if __name__ == "__main__":
    main()
