"""A copy of many rows in one call, past the processor's cache: `kvgrpc_copy_rows` of `rows.c`.

The speed of copies of short runs is bound by the time between two runs. Of the other copies, memmove copies one run a
call, and process_vm_readv copies more slowly than memmove. The bytes of a KV block are also not read soon after the
copy, yet the C library's memmove first loads every line that it is about to overwrite (it streams only above some 200
MB): a third of the memory traffic.
"""

import functools
from collections.abc import Callable

from kvgrpc.datapath.copy.rows import row_function
from kvgrpc.datapath.host.addresses import Rows


@functools.cache
def stream_copier() -> Callable[[Rows], None] | None:
    """Returns the function that copies rows which do not overlap; None if the library was not built."""
    return row_function("kvgrpc_copy_rows")
