"""One pull, for tests that look at what lies under it."""

from kvgrpc.client import Client, move


async def pull(p: Client, d: Client) -> None:
    """Moves two blocks from P to D, and frees them."""
    taken = await p.allocate(2, ttl_s=60)
    moved = await move(p, d, taken, list(range(32)))
    await d.free(moved.blocks)
    await p.free(taken)
