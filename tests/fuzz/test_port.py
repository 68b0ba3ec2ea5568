"""Bytes on the port that are no call: almost valid HTTP/2 that carries almost valid calls."""

from random import Random

from tests.fuzz.calls import bodies_for
from tests.fuzz.conftest import Run
from tests.fuzz.messages import Maker
from tests.fuzz.target import Target
from tests.service.http2 import EMPTY_SETTINGS, PREFACE, connected, frame, send
from tests.service.services import SERVICES

DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
# Nobody reads the answers here, so blocks from AllocateBlocks could not be freed.
METHODS = [method for service in SERVICES for method in service.methods if method.name != "AllocateBlocks"]
PLACES = (0, 1, 3, 5, 1 << 31)


def headers(path: str) -> bytes:
    """Returns the header block of a gRPC call, with every field as a literal that is not indexed."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    return b"".join(b"\0" + bytes([len(text)]) + text.encode() for row in fields.items() for text in row)


def connection(random: Random, target: Target) -> bytes:
    """Returns all bytes of one connection: calls on some streams, among stray frames."""
    maker, frames = Maker(random, target.first.known), [EMPTY_SETTINGS]
    for stream in (1, 3, 5)[: random.choice((1, 2, 3))]:
        method = random.choice(METHODS)
        assert method.containing_service is not None
        path = f"/{method.containing_service.full_name}/{method.name}"
        frames.append(frame(HEADERS, END_HEADERS, stream, headers(path)))
        for body in bodies_for(maker, random, target, method):
            frames.append(frame(DATA, END_STREAM, stream, b"\0" + len(body).to_bytes(4, "big") + body[:16_000]))
    for _ in range(random.choice((0, 1, 2, 5))):
        kind = random.choice((DATA, HEADERS, 2, 3, SETTINGS, 5, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION, 200))
        stray = frame(kind, random.choice((0, 1, 4, 5, 8, 32, 255)), random.choice(PLACES), maker.garbled(b"\0" * 8))
        frames.insert(random.randrange(len(frames) + 1), stray)
    whole = PREFACE + b"".join(frames)
    return maker.garbled(whole) if random.random() < 0.5 else whole


def test_no_bytes_on_the_port_stop_the_server_or_leak_a_block(target: Target, run: Run) -> None:
    def connect(random: Random) -> None:
        data = connection(random, target)

        def give() -> None:
            with connected(target.engine) as socket:
                send(socket, data)

        target.send_bytes(len(data), give)

    run(connect, 0.08)
    target.check_sound()
