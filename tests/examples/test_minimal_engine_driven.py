"""A stopped computation writes nothing after the answer to the stop."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from examples.minimal_engine.driven import Computations, DrivenEngine, Handler, Stopped
from tests.examples.http_engines import until

WORK = {"token_ids": [1], "computed_tokens": 0, "max_tokens": 5, "blocks": {}}
UNTIL_S = 30.0


class Writer:
    """A fake engine that writes once for each token, each time when the test lets it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.goes_on = threading.Semaphore(0)
        self.written = 0

    def compute(
        self, ids: list[int], computed_tokens: int, max_tokens: int, blocks: Any, check: Callable[[], None]
    ) -> Iterator[int]:
        for token in range(max_tokens):
            check()
            self.begun.release()
            assert self.goes_on.acquire(timeout=UNTIL_S)
            self.written += 1
            yield token


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def port(writer: Writer) -> Iterator[int]:
    handler = type("Made", (Handler,), {"engine": writer, "computations": Computations()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def begin(port: int, name: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=UNTIL_S)
    connection.request("POST", "/compute", json.dumps({"id": name, **WORK}))
    return connection


def stop(port: int, name: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=UNTIL_S)
    connection.request("DELETE", f"/compute/{name}")
    return connection.getresponse().status


def test_the_answer_to_a_stop_comes_after_the_last_write(port: int, writer: Writer) -> None:
    connection = begin(port, "a")
    assert writer.begun.acquire(timeout=UNTIL_S)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    answered: list[tuple[int, int]] = []
    stopping = threading.Thread(target=lambda: answered.append((stop(port, "a"), writer.written)))
    stopping.start()
    stopping.join(0.2)
    assert not answered, "it writes still"
    writer.goes_on.release(5)
    stopping.join(UNTIL_S)
    assert answered == [(204, writer.written)]
    assert writer.written <= 2


def test_a_computation_that_was_stopped_before_it_came_writes_nothing(port: int, writer: Writer) -> None:
    assert stop(port, "a") == 204
    writer.goes_on.release(5)
    with pytest.raises(http.client.HTTPException):
        begin(port, "a").getresponse()
    assert writer.written == 0
    reply = begin(port, "b").getresponse()
    assert json.loads(reply.read().splitlines()[-1]) == {"finish_reason": "length"}
    assert writer.written == 5


def test_only_the_latest_stops_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.minimal_engine.driven.REMEMBERED", 2)
    computations = Computations()
    for name in "abc":
        computations.stop(name)
    with computations.running("a"):
        computations.check("a")
    for name in "bc":
        with pytest.raises(Stopped), computations.running(name):
            pass


def test_nothing_is_computed_once_its_turn_comes_after_the_stop() -> None:
    """The model computes for one request at a time, so a stop may come while a computation waits."""
    engine = DrivenEngine.__new__(DrivenEngine)
    engine._turn = threading.Lock()
    engine.model = None  # type: ignore[assignment]
    computations, ended = Computations(), list[type[BaseException]]()

    def compute() -> None:
        try:
            with computations.running("a"):
                engine._forward([1], 0, [0], lambda: computations.check("a"))
        except Stopped as error:
            ended.append(type(error))

    with engine._turn:
        waiting = threading.Thread(target=compute)
        waiting.start()
        until(lambda: "a" in computations._running)
        stopping = threading.Thread(target=computations.stop, args=("a",))
        stopping.start()
        until(lambda: "a" in computations._stopped)
        assert stopping.is_alive()
    stopping.join(UNTIL_S)
    waiting.join(UNTIL_S)
    assert ended == [Stopped]
