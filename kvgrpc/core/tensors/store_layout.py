"""A staging store is a pool with one group of pages. Each page is a block that the server gives out.

Both sides make the layout here, so stores of any sizes can exchange tensors. Stores with other page sizes are refused
when their leads meet.
"""

from kvgrpc.core.values.layout import PAGES, Group, GroupKind, PoolLayout, uniform_layout
from kvgrpc.errors import KVGrpcError, invalid

PAGE_BYTES = 64 * 1024
PAGE_BYTES_MIN = 4 * 1024
PAGE_BYTES_MAX = 1 << 30
PAGES_MAX = 1 << 24


def store_layout(store_bytes: int, page_bytes: int = PAGE_BYTES) -> PoolLayout:
    """Returns the layout of a store of as many whole pages as fit. Raises InvalidRequest unless a page is a power of
    two from 4 KiB to 1 GiB and the store has 1 to 2^24 pages.
    """
    if not PAGE_BYTES_MIN <= page_bytes <= PAGE_BYTES_MAX or page_bytes & (page_bytes - 1):
        raise invalid("page_bytes", f"is a power of two from {PAGE_BYTES_MIN} to {PAGE_BYTES_MAX}")
    pages = store_bytes // page_bytes
    if not 1 <= pages <= PAGES_MAX:
        raise invalid("store_bytes", f"holds 1 to {PAGES_MAX} pages of {page_bytes} bytes")
    return uniform_layout(Group(PAGES, GroupKind.MLA, 1, 1, pages, 1, page_bytes, "uint8"), page_bytes)


def page_bytes_of(layout: PoolLayout) -> int:
    """Returns the bytes of a store's page, or 0 for a pool that is no store."""
    group, page_bytes = layout.groups[0], layout.block_bytes(0)
    pages = group.blocks
    try:
        return page_bytes if layout == store_layout(page_bytes * pages, page_bytes) else 0
    except KVGrpcError:
        return 0


def pages_for(nbytes: int, page_bytes: int) -> int:
    return -(-nbytes // page_bytes)
