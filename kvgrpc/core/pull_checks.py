"""What is checked before a pull changes anything: its grant, its destination, and the source's answer."""

from kvgrpc.core.descriptors import check_ids
from kvgrpc.core.events import Destination, Opened, PullBlocks
from kvgrpc.core.grants import Access as AccessKind
from kvgrpc.core.grants import Claims, read_claims
from kvgrpc.core.pins import Blocks, PinKind
from kvgrpc.core.pull import Pull
from kvgrpc.core.state import NodeState
from kvgrpc.errors import KVGrpcError, PermissionDenied, PreconditionFailed, Reason


def check_grant(state: NodeState, event: PullBlocks) -> Claims:
    """What the grant says, if a pull can use it. Raises what `read_claims` raises, and for a wrong kind or key."""
    claims = read_claims(event.token)
    if claims.access is not AccessKind.READ:
        raise PreconditionFailed(Reason.GRANT_WRONG_ACCESS, "a pull takes a READ grant; this is a WRITE grant")
    if event.key and event.key != claims.transfer_key:
        raise PermissionDenied(
            Reason.TRANSFER_KEY_MISMATCH, "this grant belongs to another request than the transfer key"
        )
    state.check_key(claims.transfer_key)
    _ = state.pool
    return claims


def check_destination(state: NodeState, destination: Destination, tokens: int) -> tuple[Blocks, list[int]]:
    """The destination's blocks and how many of the source's each group skips."""
    blocks = state.resolve(destination.blocks, "destination.blocks")
    skip = [destination.have_tokens // group.block_tokens for group in state.pool.pool.groups]
    if any(len(ids) for ids in blocks):
        for i, group in enumerate(state.pool.pool.groups):
            needed = max(-(-tokens // group.block_tokens) - skip[i], 0)
            if len(blocks[i]) != needed:
                raise PreconditionFailed(
                    Reason.BLOCK_COUNT_MISMATCH,
                    f"group {i}: {tokens} tokens of which {destination.have_tokens} are held take {needed} "
                    f"blocks; {len(blocks[i])} are listed",
                )
    state.check_owned(blocks)
    state.pins.check_free_for(PinKind.TARGET, blocks)
    return blocks, skip


def check_opened(state: NodeState, pull: Pull, opened: Opened) -> str:
    """What is wrong with the source's answer; empty when nothing is. A peer's data proves nothing by itself."""
    groups = state.peers[pull.peer].description.pool.groups
    if opened.token_count != pull.claim.tokens:
        return f"it granted {opened.token_count} tokens, {pull.claim.tokens} were asked for"
    if [group for group, _ in opened.blocks] != list(range(len(groups))):
        return "it does not list every group once"
    if not (opened.ttl_s > 0 and opened.remaining_s >= 0):
        return "its lease has no time"
    for group, (_, ids) in zip(groups, opened.blocks, strict=True):
        if len(ids) != -(-opened.token_count // group.block_tokens):
            return f"group {group.name} lists {len(ids)} blocks for {opened.token_count} tokens"
        try:
            check_ids(ids, group.blocks, f"group {group.name}")
        except KVGrpcError as bad:
            return str(bad)
    return ""
