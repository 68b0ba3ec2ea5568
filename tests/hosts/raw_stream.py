"""One TCP stream, as the baseline of a network: one process sends on demand, another one receives and times it.

python raw_stream.py send ADDRESS PORT          serves until its standard input ends
python raw_stream.py receive ADDRESS PORT BYTES   prints the seconds from the connection to the last byte
"""

import os
import socket
import sys
import threading
import time

CHUNK_BYTES = 1 << 20


def send(address: str, port: int) -> None:
    """Sends as many bytes as each connection asks for."""
    with socket.create_server((address, port)) as listener:
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        sys.stdout.write("listens\n")
        sys.stdout.flush()
        sys.stdin.read()
        os._exit(0)


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(int.from_bytes(connection.recv(8), "big")))


def receive(address: str, port: int, nbytes: int) -> float:
    """Returns the seconds that the bytes took."""
    begun, left = time.perf_counter(), nbytes
    with socket.create_connection((address, port), timeout=60) as connection:
        connection.sendall(nbytes.to_bytes(8, "big"))
        while left:
            if not (received := len(connection.recv(CHUNK_BYTES))):
                raise ConnectionError("the sender ended the stream early")
            left -= received
    return time.perf_counter() - begun


if __name__ == "__main__":
    command, where, number, *rest = sys.argv[1:]
    if command == "send":
        send(where, int(number))
    else:
        sys.stdout.write(f"{receive(where, int(number), int(rest[0]))}\n")
