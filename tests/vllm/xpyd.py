"""A proxy for several prefill and decode engines, like those for vLLM's connector over NCCL: engines register over
ZeroMQ, and both legs of a request share an id that has the addresses of their stores. Nothing else is exchanged.
"""

import http.client
import itertools
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import zmq

KINDS = {"P", "D"}


class Registered:
    """HTTP address -> store address of each registered engine, by its kind."""

    def __init__(self, port: int) -> None:
        self.engines: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        self._turn = itertools.count()
        self._over = threading.Event()
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            if self._socket.poll(100):
                _, message = self._socket.recv_multipart()
                said = msgspec.msgpack.decode(message)
                self.engines[said["type"]][said["http_address"]] = said["zmq_address"]
        self._socket.close(0)

    def both(self) -> bool:
        """Checks that a request can be served."""
        return all(self.engines.values())

    def pair(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Returns the next prefill and decode engine."""
        turn = next(self._turn)
        prefills, decodes = (list(self.engines[kind].items()) for kind in "PD")
        return prefills[turn % len(prefills)], decodes[turn % len(decodes)]

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def post(address: str, path: str, body: Any, request_id: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        headers = {"content-type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextmanager
def xpyd_proxy(http_port: int, port: int) -> Iterator[Registered]:
    """Serves HTTP, and listens for engines."""
    registered = Registered(port)

    class Legs(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            (prefill, prefill_store), (decode, decode_store) = registered.pair()
            request_id = f"___prefill_addr_{prefill_store}___decode_addr_{decode_store}_{uuid.uuid4().hex}"
            status, answer = post(prefill, self.path, {**body, "max_tokens": 1}, request_id)
            if status == http.client.OK:
                status, answer = post(decode, self.path, body, request_id)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", http_port), Legs)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield registered
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        registered.close()
