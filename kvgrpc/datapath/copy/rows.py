"""The functions of `rows.c`: loops over many rows, or runs, in one call that releases the interpreter lock.

The functions are compiled when the package is installed, if there is a compiler. Every caller has another way without
them.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

from kvgrpc.datapath.host.addresses import Rows

LIBRARY = Path(__file__).with_name("_rows.so")


@functools.cache
def load(path: Path = LIBRARY) -> ctypes.CDLL | None:
    """Returns the compiled library; None if it was not built, or for another machine."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def row_function(name: str, *more: int, path: Path = LIBRARY) -> Callable[[Rows], None] | None:
    """Returns the library's void name(rows, count, more...) as a function of rows; None without the library. `more` are
    addresses.
    """
    library = load(path)
    if library is None:
        return None
    function = library[name]
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * len(more)]

    def call(rows: Rows) -> None:
        function(rows.ctypes.data, len(rows), *more)

    return call
