"""The load generator, a process of its own: `python -m bench.overload.flood`, with a job as JSON on standard input.

It offers calls at a rate, whatever becomes of them (open loop), or keeps a number of them in flight (closed loop, with
a rate of 0). Like every client of HTTP/2 it opens no more streams at once than a connection may have: calls that are
due then wait here, and the oldest of too many are given up. It ends by itself.

After its connections stand it prints a line, and begins when it reads one. Then it prints its result as JSON.
"""

import json
import math
import os
import random
import selectors
import socket
import ssl
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from bench.overload import frames

SLOT_S = 0.1
"""Time of one count of answers, in seconds."""
BACKLOG_S = 1.0
"""Time for which a call that is due waits for a stream, in seconds."""
READ_BYTES = 1 << 18
REFUSED_STREAM, PAUSE_S = 7, 0.01
GROWTH = 0.05
WATCH_S = 0.5
"""Time after which the generator ends a stream that lasts, in seconds."""


@dataclass
class Outcome:
    """What became of the calls."""

    due: int = 0
    """Number of calls that the rate asked for."""
    sent: int = 0
    served: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Number of refusals by reason; by number of the status if there is none."""
    kept_back: int = 0
    """Number of calls that were due and never sent, because no stream was free."""
    sent_back: int = 0
    """Number of times that a call was to be sent again: the server had not yet let go of the stream before it."""
    unanswered: int = 0
    """Number of calls without an answer at the end."""
    slots: Counter[int] = field(default_factory=Counter)
    """Number of served calls by slot of time."""
    seconds: float = 0.0
    processor_s: float = 0.0
    streams: int = 0
    """Maximum number of streams of a connection."""


class Connection:
    """One connection."""

    def __init__(self, flood: "Flood", sock: socket.socket) -> None:
        self._flood, self.sock = flood, sock
        self._in, self.out = bytearray(), bytearray(frames.greeting())
        self._next_stream = 1
        self._window = frames.FIRST_WINDOW_BYTES
        self._owed = 0
        self.open: dict[int, int] = {}
        """Kinds of the open calls by stream."""
        self.lasting: deque[tuple[float, int]] = deque()
        self.streams = 0
        self.over = False
        self._pause_until = 0.0
        self._most = math.inf
        """Number of open streams that the server takes: it counts a stream for a moment after its end."""

    def room(self) -> bool:
        free = len(self.open) < min(self._most, self.streams) and self._window > READ_BYTES >> 4
        return free and not self.over and self._pause_until < time.monotonic()

    def begin(self, kind: int) -> None:
        block, body, lasts = self._flood.kinds[kind]
        data = body.replace(MARK, os.urandom(len(MARK)))
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._window -= len(data) + 5
        self.out += frames.call(stream, block, data)
        self.open[stream] = kind
        if lasts:
            self.lasting.append((time.monotonic() + WATCH_S, stream))

    def end_lasting(self, now: float) -> None:
        while self.lasting and self.lasting[0][0] <= now:
            _, stream = self.lasting.popleft()
            if self.open.pop(stream, None) is not None:
                self.out += frames.frame(frames.RST_STREAM, 0, stream, b"\0\0\0\x08")
                self._flood.ended(0, "")

    def flush(self) -> None:
        try:
            while self.out:
                del self.out[: self.sock.send(memoryview(self.out)[:READ_BYTES])]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError:
            self.over = True

    def read(self) -> None:
        try:
            while True:
                data = self.sock.recv(READ_BYTES)
                if not data:
                    self.over = True
                    break
                self._in += data
                if len(data) < READ_BYTES and not isinstance(self.sock, ssl.SSLSocket):
                    break
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:
            self.over = True
        for one in frames.frames(self._in):
            self._take(one)

    def _take(self, one: frames.Frame) -> None:
        match one.kind:
            case frames.DATA:
                self._received(len(one.payload))
            case frames.HEADERS if one.flags & frames.END_STREAM:
                if self.open.pop(one.stream, None) is not None:
                    self._flood.ended(*frames.status_of(one.payload))
                    self._most += GROWTH
            case frames.RST_STREAM:
                if self.open.pop(one.stream, None) is not None:
                    self._broken_off(int.from_bytes(one.payload, "big"))
            case frames.SETTINGS if not one.flags & frames.ACK:
                self.streams = frames.streams_of(one.payload) or self.streams
                self.out += frames.frame(frames.SETTINGS, frames.ACK, 0, b"")
            case frames.PING if not one.flags & frames.ACK:
                self.out += frames.frame(frames.PING, frames.ACK, 0, one.payload)
            case frames.WINDOW_UPDATE if one.stream == 0:
                self._window += int.from_bytes(one.payload, "big")
            case frames.GOAWAY:
                self.over = True

    def _received(self, nbytes: int) -> None:
        self._owed += nbytes
        if self._owed > frames.WINDOW_BYTES >> 2:
            self.out += frames.frame(frames.WINDOW_UPDATE, 0, 0, self._owed.to_bytes(4, "big"))
            self._owed = 0

    def _broken_off(self, code: int) -> None:
        if code != REFUSED_STREAM:
            self._flood.ended(-1, f"RST_STREAM {code}")
            return
        # Every library sends such a call again.
        self._pause_until = time.monotonic() + PAUSE_S
        self._most = len(self.open)
        self._flood.sent_back()


MARK = b"\xfe\xdc\xba\x98" * 4
"""Bytes of a request in whose place each call has random ones."""


class Flood:
    """All connections, and the calls that are due."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        tls = bool(job["tls"])
        self.kinds = [
            (
                frames.head(kind["path"], job["authority"], tls=tls, timeout_s=job["timeout_s"]),
                bytes.fromhex(kind["body"]),
                bool(kind["lasts"]),
            )
            for kind in job["kinds"]
        ]
        self._mix = [number for number, kind in enumerate(job["kinds"]) for _ in range(kind["share"])]
        random.Random(1).shuffle(self._mix)  # noqa: S311 - the same in every run
        self._turn = 0
        self.found = Outcome()
        self._selector = selectors.DefaultSelector()
        self._connections = [self._connect() for _ in range(job["connections"])]
        self._flying = 0
        self._began = 0.0

    def _connect(self) -> Connection:
        host, _, port = self._job["address"].rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._job["tls"]:
            context = ssl.create_default_context(cafile=f"{self._job['tls']}/ca.crt")
            context.load_cert_chain(f"{self._job['tls']}/tls.crt", f"{self._job['tls']}/tls.key")
            context.set_alpn_protocols(["h2"])
            sock = context.wrap_socket(sock, server_hostname="localhost")
        sock.setblocking(False)
        made = Connection(self, sock)
        self._selector.register(sock, selectors.EVENT_READ, made)
        return made

    def ended(self, status: int, reason: str) -> None:
        self._flying -= 1
        if status == 0:
            self.found.served += 1
            self.found.slots[int((time.monotonic() - self._began) / SLOT_S)] += 1
        else:
            self.found.refused[reason or f"status {status}"] += 1

    def sent_back(self) -> None:
        self._flying -= 1
        self.found.sent -= 1
        self.found.sent_back += 1

    def greet(self) -> None:
        """Waits until every server has said how many streams a connection may have."""
        until = time.monotonic() + 10
        while time.monotonic() < until and not all(one.streams for one in self._connections):
            self._exchange(0.05)

    def _exchange(self, timeout_s: float) -> None:
        for one in self._connections:
            if one.out:
                one.flush()
        for key, _ in self._selector.select(timeout_s):
            key.data.read()
            if key.data.over:
                self._selector.unregister(key.fileobj)

    def run(self) -> Outcome:
        """Offers the calls. Returns what became of them."""
        job, found = self._job, self.found
        found.streams = max(one.streams for one in self._connections)
        began = self._began = time.monotonic()
        until, given_up = began + job["seconds"], 0
        while (now := time.monotonic()) < until:
            if job["rate"]:
                found.due = int((now - began) * job["rate"])
                # Calls that have waited for long are given up, as a caller with a deadline does.
                late = int((now - began - BACKLOG_S) * job["rate"]) - found.sent - given_up
                given_up += max(late, 0)
                free = found.due - found.sent - given_up
            else:
                free = job["in_flight"] - self._flying
            self._send(min(free, SENT_AT_ONCE))
            for one in self._connections:
                if one.lasting:
                    one.end_lasting(now)
            self._exchange(0.0 if free > SENT_AT_ONCE else 0.002)
        found.seconds = time.monotonic() - began
        found.processor_s = time.process_time()
        found.unanswered = self._flying
        found.due = found.due if job["rate"] else found.sent
        found.kept_back = found.due - found.sent
        for one in self._connections:
            one.sock.close()
        return found

    def _send(self, count: int) -> None:
        free = [one for one in self._connections if one.room()]
        while count > 0 and free:
            for one in free:
                if count <= 0:
                    break
                self._turn += 1
                one.begin(self._mix[self._turn % len(self._mix)])
                self._flying += 1
                self.found.sent += 1
                count -= 1
            free = [one for one in free if one.room()]


SENT_AT_ONCE = 512
"""Maximum number of calls to begin before answers are read."""


def main() -> None:
    """Runs one job."""
    flood = Flood(json.loads(sys.stdin.readline()))
    flood.greet()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(vars(flood.run())), flush=True)


if __name__ == "__main__":
    main()
