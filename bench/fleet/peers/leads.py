"""A process with many real leads, each with a small pool, a port and connections of its own."""

import logging
from typing import Any

from bench.fleet.child import Answerer, answer_lines, no_answer
from bench.fleet.peers.pools import POOL
from kvgrpc.config import Config
from kvgrpc.server import Server

_servers: list[Server] = []


async def begin(job: dict[str, Any]) -> tuple[dict[str, Any], Answerer]:
    """Starts as many leads as the job says. Says their addresses."""
    for number in range(job["first"], job["first"] + job["count"]):
        server = Server(
            Config(engine_id=f"peer-{number:03}", listen="127.0.0.1:0", data_paths=("shm",), copy_threads=1, pool=POOL)
        )
        await server.start()
        _servers.append(server)
    return {"addresses": [server.address for server in _servers]}, no_answer


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # one line for each pair: that its weights are not compared
    answer_lines(begin)
