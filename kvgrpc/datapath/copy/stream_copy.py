"""A copy of many rows in one call, past the processor's cache: `kvgrpc_copy_rows` of `rows.c`.

A copy of short runs is bound by what happens between two runs, and nothing else that Python can call copies more than
one. And the bytes of a KV block are not read soon after the copy, yet the C library's memmove first loads every line
that it is about to overwrite (it streams only above some 200 MB): a third of the memory traffic.
"""

import functools
from collections.abc import Callable

from kvgrpc.datapath.copy.rows import row_function
from kvgrpc.datapath.host.addresses import Rows


@functools.cache
def stream_copier() -> Callable[[Rows], None] | None:
    """The function that copies rows which do not overlap; None where the library was not built."""
    return row_function("kvgrpc_copy_rows")
