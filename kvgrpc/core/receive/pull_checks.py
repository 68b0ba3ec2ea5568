"""Checks before a pull changes anything: its grant, its destination, and the source's answer."""

from collections.abc import Sequence

from kvgrpc.core.events import Destination, Opened, PullBlocks
from kvgrpc.core.moves.opened_check import wrong_blocks
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.pull import PullMove
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.values import content as contents
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.content import UNIT_TOKENS, ContentClaim
from kvgrpc.core.values.grants import AccessKind, Claims, check_tenant, read_claims
from kvgrpc.core.values.groups import Group
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.core.values.layout import check_prefix
from kvgrpc.core.values.owners import tenant_of
from kvgrpc.errors import InvalidRequest, PermissionDenied, PreconditionFailed, Reason, invalid


def check_pull(state: NodeState, event: PullBlocks) -> tuple[Claims, ContentClaim]:
    """Returns the grant's claims, and the claim to make of its content. Raises the errors of `read_claims` and
    `contents.claim`, and errors for a wrong kind or key.
    """
    assert len(event.access_id) == ACCESS_ID_BYTES, "the event has 16 random bytes"
    claims = read_claims(event.token)
    if claims.access is not AccessKind.READ:
        raise PreconditionFailed(Reason.GRANT_WRONG_ACCESS, "a pull takes a READ grant; this is a WRITE grant")
    check_tenant(event.call.principal, claims)
    check_key(event.key, claims.transfer_key, "this grant")
    state.tombstones.check_key(claims.transfer_key, tenant=claims.tenant or tenant_of(event.call.principal))
    if event.content is None:
        raise InvalidRequest(Reason.CONTENT_REQUIRED, "a pull states the content that it wants")
    claim = contents.claim(event.content, claims.token_count, event.use_tokens, prefix=event.allow_prefix)
    check_prefix(state.life.engine.pool.groups, claims.token_count, claim.tokens)
    return claims, claim


def check_key(stated: bytes, key: bytes, what: str) -> None:
    """Raises PermissionDenied (TRANSFER_KEY_MISMATCH) for a stated key that is not the request's."""
    if stated and stated != key:
        raise PermissionDenied(Reason.TRANSFER_KEY_MISMATCH, f"{what} belongs to another request than the transfer key")


def check_destination(
    state: NodeState, destination: Destination, tokens: int, caller: str, prefix: str = "destination."
) -> Blocks:
    """Returns the destination's blocks, which `caller` names. `prefix`: the path of its fields in the request."""
    have = destination.have_tokens
    if have < 0:
        raise invalid(f"{prefix}have_tokens", f"counts tokens; got {have}")
    groups = state.life.engine.pool.groups
    blocks = state.pool.resolve(destination.blocks, f"{prefix}blocks")
    if any(map(len, blocks)):
        for i, group in enumerate(groups):
            needed = max(group.blocks_of(tokens) - group.held_of(tokens, have), 0)
            if len(blocks[i]) != needed:
                raise InvalidRequest(
                    Reason.BLOCK_COUNT_MISMATCH,
                    f"group {i}: {tokens} tokens of which {have} are held take {needed} blocks; "
                    f"{len(blocks[i])} are listed",
                    metadata={"group": str(i), "block_count": str(needed)},
                )
    state.pool.check_owned(blocks, destination.allocation_id, caller)
    state.pool.pins.check_free_for(PinKind.TARGET, blocks)
    return blocks


def wrong_opened(source: EngineDescription, pull: PullMove, opened: Opened, groups: Sequence[Group]) -> str:
    """Returns the error in the source's answer, as text; empty if there is none. `groups`: of this engine."""
    claim = pull.claim
    fewer = claim.prefix and 0 < opened.token_count < claim.tokens and opened.token_count % UNIT_TOKENS == 0
    if opened.token_count != claim.tokens and not fewer:
        return f"it granted {opened.token_count} tokens, {claim.tokens} were asked for"
    if fewer and not all(group.stands_for(claim.tokens, opened.token_count) for group in groups):
        return f"its first {opened.token_count} tokens do not serve the blocks of {claim.tokens} here"
    if not (opened.ttl_s > 0 and opened.remaining_s >= 0):
        return "its lease has no time"
    return wrong_blocks(source, opened, exact=True)
