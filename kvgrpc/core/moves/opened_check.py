"""Checks a peer's answer to OpenAccess before anything moves: a peer's data proves nothing by itself."""

from kvgrpc.core.events import Opened
from kvgrpc.core.values.block_ids import check_ids, check_spaces
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.errors import KVGrpcError


def wrong_blocks(peer: EngineDescription, opened: Opened, *, exact: bool) -> str:
    """Returns the error in the blocks that a peer lists, as text; empty if there is none. `exact`: the peer must list
    all blocks of its tokens, otherwise at most all.
    """
    groups, lists = peer.pool.groups, opened.blocks
    if [group for group, _ in lists] != list(range(len(groups))):
        return "it does not list every group once"
    for group, (_, ids) in zip(groups, lists, strict=True):
        count = group.blocks_of(opened.token_count)
        if len(ids) > count or (exact and len(ids) < count):
            return f"group {group.name} lists {len(ids)} blocks for {opened.token_count} tokens"
        try:
            check_ids(ids, group.blocks, f"group {group.name}")
        except KVGrpcError as bad:
            return str(bad)
    try:
        check_spaces([ids for _, ids in lists], peer.pool, "it")
    except KVGrpcError as bad:
        return str(bad)
    return ""
