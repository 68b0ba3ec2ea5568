"""HTTP engines for tests of routers: they have no model, but everything else that a router sees of an engine.

At `/compute` an engine only computes. At `/v1/completions` it has a scheduler: it moves KV by itself, as the
`kv_transfer_params` of its requests say, with real calls to a real lead.
"""

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvgrpc.client import SyncClient, connect_sync
from kvgrpc.errors import KVGrpcError
from kvgrpc.v1 import transfer_pb2
from kvgrpc.v1.common_pb2 import Grant, PeerAddress

BLOCK_TOKENS = 16
Json = dict[str, Any]


def token(ids: Sequence[int], place: int) -> int:
    """Returns a fake token that depends on the whole prompt and on the place."""
    found = place
    for number in ids:
        found = (found * 31 + number) % 1000
    return found


class TransferFailed(Exception):
    """Raised when the KV did not come."""


class HttpEngine:
    """An engine and its lead's client. A test closes `gate` to hold requests before they take KV from elsewhere, and
    after their own prompt's KV exists.
    """

    def __init__(self, lead: str) -> None:
        self.lead = lead
        self.url = ""
        self.computed: list[Json] = []
        """Requests at `/compute`."""
        self.completed: list[Json] = []
        """Requests at `/v1/completions`."""
        self.traces: list[str] = []
        self.arrived = threading.Semaphore(0)
        """Released once by each request that waits at the gate."""
        self.gate = threading.Event()
        self.gate.set()
        self.computing: set[str] = set()
        """Ids of computations under way at `/compute`."""
        self.client: SyncClient

    def wait_at_gate(self, gone: Callable[[], bool]) -> None:
        """Waits until the gate is open. Raises BrokenPipeError when the caller leaves."""
        if self.gate.is_set():
            return
        self.arrived.release()
        while not self.gate.wait(0.01):
            if gone():
                raise BrokenPipeError

    # -- an engine with a scheduler

    def complete(self, body: Json, gone: Callable[[], bool]) -> Json:
        """Answers one completion, and gives or takes its KV as the request says."""
        ids, params = body["prompt"], body.get("kv_transfer_params") or {}
        answer: Json = {"choices": [{"token_ids": [token(ids, place) for place in range(body["max_tokens"])]}]}
        if params.get("do_remote_decode"):
            self.wait_at_gate(gone)
            return answer | {"kv_transfer_params": self._give(ids, params["kvgrpc_intent"])}
        if params.get("do_remote_prefill"):
            self._take(ids, params, gone)
        else:
            self.wait_at_gate(gone)
        return answer

    def _give(self, ids: Sequence[int], intent: Json) -> Json:
        """Hands the prompt over, and frees its blocks, which the lease keeps."""
        key, label = base64.b64decode(intent["transferKey"]), intent["requestId"]
        taken = self._allocate(ids)
        try:
            if intent["mode"] == "TRANSFER_MODE_PUSH":
                self.client.push_part(key, taken, ids, last=True, request_id=label)
                return {}
            handed_over = self.client.finished_blocks(
                taken, ids, transfer_key=key, request_id=label, ttl_s=float(intent["ttl"].removesuffix("s"))
            )
        finally:
            self.client.free(taken.blocks.allocation_id)
        token = base64.urlsafe_b64encode(handed_over.grant.token).decode()
        return {"do_remote_prefill": True, "do_remote_decode": False, "kvgrpc_grant": token, "of": "the engine"}

    def _take(self, ids: Sequence[int], params: Json, gone: Callable[[], bool]) -> None:
        """Takes the prompt's KV, and frees its blocks in any case. Raises TransferFailed."""
        intent = params["kvgrpc_intent"]
        key, label = base64.b64decode(intent["transferKey"]), intent["requestId"]
        taken = self._allocate(ids)
        transfer_id = ""
        try:
            if intent["mode"] == "TRANSFER_MODE_PUSH":
                source = PeerAddress(address=intent["peer"]["address"])
                reserved = self.client.reserve_blocks(key, taken, ids, source=source, request_id=label)
                transfer_id = reserved.transfer.transfer_id
                self.wait_at_gate(gone)
            else:
                self.wait_at_gate(gone)
                grant = Grant(token=base64.urlsafe_b64decode(params["kvgrpc_grant"]))
                pull = self.client.pull_blocks(grant, ids, blocks=taken, transfer_key=key, request_id=label)
                transfer_id = pull.transfer.transfer_id
            self._follow(transfer_id, gone)
        except BrokenPipeError:
            if transfer_id:
                self.client.cancel(transfer_id, message="aborted", scope=transfer_pb2.CANCEL_SCOPE_ON_ABORT)
            raise
        finally:
            self.client.free(taken.blocks.allocation_id)

    def _follow(self, transfer_id: str, gone: Callable[[], bool]) -> None:
        while True:
            (row,) = self.client.wait_transfers([transfer_id], timeout_s=0.1).waited_transfers
            if row.condition_met:
                break
            if gone():
                raise BrokenPipeError
        if row.transfer.state != transfer_pb2.TRANSFER_STATE_SUCCEEDED:
            raise TransferFailed(row.transfer.failure.message)

    def _allocate(self, ids: Sequence[int]) -> Any:
        return self.client.allocate(-(-len(ids) // BLOCK_TOKENS), ttl_s=60.0)


class _Handler(BaseHTTPRequestHandler):
    engine: HttpEngine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.engine.traces.append(self.headers.get("traceparent", ""))
        with suppress(BrokenPipeError, ConnectionResetError):
            if self.path != "/compute":
                self._complete(body)
                return
            self.engine.computing.add(body["id"])
            try:
                self._compute(body)
            finally:
                self.engine.computing.discard(body["id"])

    def do_DELETE(self) -> None:
        name = self.path.removeprefix("/compute/")
        until(lambda: name not in self.engine.computing)
        self.send_response(204)
        self.end_headers()

    def _compute(self, body: Json) -> None:
        self.engine.computed.append(body)
        self.engine.wait_at_gate(self._gone)
        self.send_response(200)
        self.end_headers()
        lines = [{"token_id": token(body["token_ids"], place)} for place in range(body["max_tokens"])]
        for line in [*lines, {"finish_reason": "length"}]:
            self.wfile.write(json.dumps(line).encode() + b"\n")

    def _complete(self, body: Json) -> None:
        self.engine.completed.append(body)
        try:
            status, answer = 200, self.engine.complete(body, self._gone)
        except (TransferFailed, KVGrpcError) as error:
            status, answer = 500, {"error": {"message": str(error)}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _gone(self) -> bool:
        """Checks whether the caller has left."""
        self.connection.settimeout(0.001)
        try:
            return not self.connection.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(None)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Logs nothing."""


@contextmanager
def serving(lead: str) -> Iterator[HttpEngine]:
    """Yields an engine that listens. At the end the gate opens for all requests that wait."""
    engine = HttpEngine(lead)
    handler = type("Handler", (_Handler,), {"engine": engine})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False  # closing waits for the threads
    engine.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    with connect_sync(lead, timeout_s=5.0) as engine.client:
        try:
            yield engine
        finally:
            engine.gate.set()
            server.shutdown()
            server.server_close()
            thread.join()


def until(holds: Callable[[], bool], what: Callable[[], object] = str, timeout_s: float = 45.0) -> None:
    """Waits until the condition holds. Fails at the deadline with the text of `what`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"did not come within {timeout_s} s: {what()}"
        time.sleep(0.01)
