"""The C library, called from Python: the structures of its header, and a rank."""

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_double, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgrpc.engine import RankTicket
from tests.clients.native.builds import build

HEADER = Path("clients/c/include/kvgrpc_engine.h")


class Bytes(ctypes.Structure):
    _fields_ = [("data", c_char_p), ("size", c_size_t)]


class Error(ctypes.Structure):
    _fields_ = [("code", c_int), ("reason", c_uint32), ("message", c_char * 512)]


class Ticket(ctypes.Structure):
    _fields_ = [("socket_path", c_char_p), ("secret", Bytes), ("comes_back_s", c_double), ("memory_bytes", c_uint64)]


class Memory(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("size", c_size_t)]


class AttachOptions(ctypes.Structure):
    _fields_ = [
        ("socket_path", c_char_p), ("pool", c_void_p), ("engine_id", c_char_p), ("weights_revision", c_char_p),
        ("world_size", c_uint32), ("cannot_set_aside", c_bool), ("expects_pushes", c_bool),
        ("private_memory", c_bool),
    ]  # fmt: skip


class Refused(Exception):
    """Raised when a call of the library fails: code and reason by name, and the sentence."""

    def __init__(self, code: str, reason: str, message: str) -> None:
        super().__init__(f"{code} ({reason}): {message}")
        self.code, self.reason = code, reason


@cache
def library() -> ctypes.CDLL:
    """Builds the library, if it is not built, and loads it. Skips the test where it cannot be built."""
    made = build("clients/c", "-DBUILD_SHARED_LIBS=ON", "-DKVGRPC_ENGINE_BUILD_TESTS=OFF", name="build-shared")
    loaded = ctypes.CDLL(str(made / "libkvgrpc_engine.so"))
    for name in ("kvgrpc_code_name", "kvgrpc_reason_name", "kvgrpc_engine_version"):
        getattr(loaded, name).restype = c_char_p
    loaded.kvgrpc_rank_memory.restype = c_void_p
    loaded.kvgrpc_rank_memory_bytes.restype = c_size_t
    for name in ("rank_memory", "rank_memory_bytes", "rank_stop", "rank_close", "engine_close"):
        getattr(loaded, f"kvgrpc_{name}").argtypes = [c_void_p]
    loaded.kvgrpc_rank_attach.argtypes = [POINTER(Ticket), c_uint32, POINTER(c_void_p), POINTER(Error)]
    of_rank, results = (POINTER(Ticket), c_uint32), (POINTER(c_void_p), POINTER(Error))
    loaded.kvgrpc_rank_attach_memory.argtypes = [*of_rank, POINTER(Memory), c_size_t, *results]
    loaded.kvgrpc_rank_serve.argtypes = [c_void_p, POINTER(Error)]
    loaded.kvgrpc_rank_step_done.argtypes = [c_void_p, c_uint64, POINTER(Error)]
    loaded.kvgrpc_rank_layers_done.argtypes = [c_void_p, c_uint64, c_uint32, c_uint32, POINTER(Error)]
    loaded.kvgrpc_engine_attach.argtypes = [POINTER(AttachOptions), POINTER(c_void_p), POINTER(Error)]
    return loaded


def check(name: str, *arguments: Any) -> None:
    """Calls a function of the library. Raises Refused."""
    error = Error()
    if getattr(library(), name)(*arguments, byref(error)):
        code, reason = library().kvgrpc_code_name(error.code), library().kvgrpc_reason_name(error.reason)
        raise Refused(code.decode(), reason.decode(), error.message.decode())


class NativeRank:
    """A rank of the library, with a thread that serves it. `own`: memory that it brings, in order."""

    def __init__(self, ticket: RankTicket, rank: int = 0, own: Sequence[NDArray[np.uint8]] = ()) -> None:
        self._handle = c_void_p()
        self._own = own
        secret = Bytes(ticket.secret, len(ticket.secret))
        given = Ticket(ticket.socket_path.encode(), secret, ticket.comes_back_s, ticket.memory_bytes)
        if own:
            rows = (Memory * len(own))(*(Memory(row.ctypes.data, row.nbytes) for row in own))
            check("kvgrpc_rank_attach_memory", byref(given), rank, rows, len(own), byref(self._handle))
        else:
            check("kvgrpc_rank_attach", byref(given), rank, byref(self._handle))
            size = library().kvgrpc_rank_memory_bytes(self._handle)
            address = library().kvgrpc_rank_memory(self._handle)
            self.memory: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self.ended = ""
        """How the engine's life ended for this rank; empty: it did not."""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            check("kvgrpc_rank_serve", self._handle)
        except Refused as error:
            self.ended = str(error)

    def step_done(self, step: int) -> None:
        check("kvgrpc_rank_step_done", self._handle, step)

    def layers_done(self, step: int, first: int, count: int) -> None:
        check("kvgrpc_rank_layers_done", self._handle, step, first, count)

    def wait_ended(self, timeout_s: float) -> str:
        """Returns how the engine's life ended. Fails if it does not."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        return self.ended

    def close(self) -> None:
        library().kvgrpc_rank_stop(self._handle)
        self._thread.join()
        library().kvgrpc_rank_close(self._handle)
