"""The demo's model as an engine that only computes: its lead gives out the blocks, and a router says what to compute in
which of them. `examples/router-go` drives two of these.

    kvgrpc serve --no-pool --session-socket P.sock
    python -m examples.minimal_engine.driven --session-socket P.sock --port 8100

`POST /compute` takes {"id", "token_ids", "computed_tokens", "max_tokens", "blocks"}; `blocks` is a message
kvgrpc.v1.Blocks. It computes the KV of the tokens from `computed_tokens` on, in these blocks, and then `max_tokens`
more. The answer has a line {"token_id"} for each of them as it comes, and a last line {"finish_reason"}.

`DELETE /compute/{id}` ends a computation. The answer, 204, comes when the computation no longer writes its blocks, and
never will: one that has not arrived yet is refused on arrival. Nobody may free the blocks before that answer, or the
last line.
"""

import argparse
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from google.protobuf.json_format import ParseDict, ParseError

from examples.minimal_engine.model import VOCAB_TOKENS, MinimalModel, greedy_token
from kvgrpc.client import block_ids
from kvgrpc.core.values.layout import Group, GroupKind, PoolKind, uniform_layout
from kvgrpc.engine import Engine, Rank
from kvgrpc.v1.common_pb2 import Blocks

REMEMBERED = 10_000
"""Number of stopped computations that are remembered, since they may still arrive."""


class Stopped(Exception):
    """Raised when the computation was stopped."""


class Computations:
    """The computations that run, and those that must not."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[str] = set()
        self._stopped: OrderedDict[str, None] = OrderedDict()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Marks a computation whose blocks may be written. Raises Stopped if the computation was stopped before it
        came.
        """
        with self._changed:
            if name in self._stopped:
                raise Stopped
            self._running.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._running.discard(name)
                self._changed.notify_all()

    def check(self, name: str) -> None:
        """Raises Stopped if the computation was stopped."""
        with self._changed:
            if name in self._stopped:
                raise Stopped

    def stop(self, name: str) -> None:
        """Stops a computation. Returns when it no longer runs."""
        with self._changed:
            self._stopped[name] = None
            while len(self._stopped) > REMEMBERED:
                self._stopped.popitem(last=False)
            self._changed.wait_for(lambda: name not in self._running)


class AnotherLife(Exception):
    """Raised when the blocks belong to an ended life of the engine."""


class DrivenEngine:
    """A model and a pool that its lead manages."""

    def __init__(self, socket_path: str, blocks: int = 256, block_tokens: int = 16) -> None:
        self.model = MinimalModel()
        self._turn = threading.Lock()
        """Lock of the model, which computes for one request at a time."""
        config = self.model.config
        shape = config.kv_heads, config.head_dim, "float32"
        group = Group("full", GroupKind.FULL_ATTENTION, config.layers, block_tokens, blocks, *shape)
        layout = uniform_layout(group, config.block_bytes(block_tokens))
        self.engine = Engine.attach(
            socket_path, pool=layout, kind=PoolKind.SERVER_MANAGED, weights_revision=self.model.weights_revision
        )
        self.rank = Rank(self.engine.ticket)
        layers = self.rank.memory.view(np.float32).reshape(config.layers, *config.kv_shape(blocks, block_tokens))
        self.kv = [torch.from_numpy(layer) for layer in layers]

    def compute(
        self, ids: list[int], computed_tokens: int, max_tokens: int, blocks: Blocks, check: Callable[[], None]
    ) -> Iterator[int]:
        """Yields tokens as they come. Before the first, raises AnotherLife, or ValueError for invalid arguments.
        `check` is called before each write, and may raise.
        """
        if blocks.incarnation != self.engine.incarnation:
            raise AnotherLife(f"the blocks are of incarnation {blocks.incarnation}")
        if not ids or not 0 <= computed_tokens <= len(ids) or max(ids) >= VOCAB_TOKENS or min(ids) < 0:
            raise ValueError(f"token ids are below {VOCAB_TOKENS}, and no more are computed than there are")
        table = block_ids(blocks)
        # The next token follows from the last one, which is computed again if its KV has come.
        start = min(computed_tokens, len(ids) - 1) if max_tokens else computed_tokens
        return self._generate(list(ids), start, max_tokens, table, check)

    def _generate(
        self, ids: list[int], start: int, count: int, table: list[int], check: Callable[[], None]
    ) -> Iterator[int]:
        logits = self._forward(ids[start:], start, table, check)
        for _ in range(count):
            ids.append(greedy_token(logits))
            yield ids[-1]
            logits = self._forward(ids[-1:], len(ids) - 1, table, check)

    def _forward(self, ids: list[int], start: int, table: list[int], check: Callable[[], None]) -> torch.Tensor:
        with self._turn:
            check()
            return self.model.forward(ids, start, table, self.kv)


class Handler(BaseHTTPRequestHandler):
    """One request. Its connection ends with it: a router that hangs up ends the computation, though not at once."""

    engine: DrivenEngine
    computations = Computations()

    def do_POST(self) -> None:
        """Serves `/compute`."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = str(body.get("id", ""))
        try:
            with self.computations.running(name):
                self._compute(body, lambda: self.computations.check(name))
        except Stopped:
            self.close_connection = True  # the one that stopped it is answered, and no longer reads this
        except ConnectionError:
            self.close_connection = True

    def do_DELETE(self) -> None:
        """Serves `/compute/{id}`."""
        self.computations.stop(self.path.rpartition("/")[2])
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()

    def _compute(self, body: dict[str, Any], check: Callable[[], None]) -> None:
        try:
            blocks = ParseDict(body["blocks"], Blocks())
            tokens = self.engine.compute(body["token_ids"], body["computed_tokens"], body["max_tokens"], blocks, check)
        except AnotherLife as error:
            self.send_error(HTTPStatus.CONFLICT, str(error))
            return
        except (KeyError, TypeError, ValueError, ParseError) as error:
            self.send_error(HTTPStatus.BAD_REQUEST, str(error))
            return
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        for token in tokens:
            self._line({"token_id": token})
        self._line({"finish_reason": "length"})

    def _line(self, line: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(line).encode() + b"\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Logs nothing: a line for each request would be too much."""


def main() -> None:
    """Serves until its lead ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session-socket", required=True, help="where its lead listens")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    Handler.engine = DrivenEngine(options.session_socket)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"driven: http://127.0.0.1:{server.server_port}", flush=True)
    while True:
        Handler.engine.engine.poll(timeout_s=60.0)


if __name__ == "__main__":
    main()
