"""Checks that a hand-over lists exactly the blocks of its tokens."""

from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.layout import Group
from kvgrpc.errors import PreconditionFailed, Reason


def check_covers(blocks: Blocks, content: ContentId, groups: tuple[Group, ...]) -> None:
    """Raises PreconditionFailed (CONTENT_RANGE) unless every group lists exactly the blocks of the content's tokens."""
    for i, (ids, group) in enumerate(zip(blocks, groups, strict=True)):
        needed = group.blocks_of(content.tokens)
        if len(ids) != needed:
            raise PreconditionFailed(
                Reason.CONTENT_RANGE,
                f"group {i}: {content.tokens} tokens fill {needed} blocks of {group.block_tokens}; "
                f"{len(ids)} are listed",
                metadata={"group": str(i), "block_count": str(needed)},
            )
