"""How much a message may hold: counted before anything is made of it.

A message of 4 MB has room for two million empty rows, or for one text that is as long. Rows cost the loop that handles
everything, texts the memory of their keeper.
"""

from collections.abc import Iterable, Sequence, Sized

import numpy as np

from kvgrpc.core.values.descriptors import FEW_IDS
from kvgrpc.core.values.endpoints import SPANS_MAX
from kvgrpc.errors import FieldViolation, OutOfRange, Reason, invalid
from kvgrpc.v1 import common_pb2

ROWS_MAX = 256
"""Rows of a batch between leads: far more than any lead sends."""
CALLS_MAX = 4_096
"""Calls of one message of a stream between leads."""
FRAME_ROWS_MAX = 65_536
"""Calls, or reports, of one frame of a session."""
RANGES_MAX = 16_384
"""Ranges of layers, names of data paths, or rows of blocks to sum up, in one message."""
RUNS_MAX = 1 << 20
"""Runs of blocks in one message."""
BLOCKS_MAX = 1 << 20
"""Blocks that all runs of one message name: 16 times what a request may, for the calls of a step."""
GROUPS_MAX = 256
"""Groups of a pool, and so rows of one list of blocks."""
BLOCK_ROWS_MAX = 65_536
"""Rows of all lists of blocks of one message."""
REGIONS_MAX = 4_096
"""Regions of a pool."""
SEGMENTS_MAX = SPANS_MAX
"""Segments of all endpoints of one message."""
DIFFERENCES_MAX = 4_096
"""Fields in which two engines differ."""
ENDPOINTS_MAX = 4_096
"""Ranks of an engine, each with one endpoint."""
IDS_MAX = 65_536
"""Ids of transfers in one call."""
TOKENS_MAX = 1 << 20
"""Tokens of one content that is stated by them; a digest chain may be longer."""
ITEMS_MAX = 8_192
"""Multimodal items of one content."""
SEND_RUNS_MAX = 131_072
"""Runs of one send: no more than a posting has."""
SEND_VALUES_MAX = 4
"""What one half of a process group tells the other."""
SEND_KEY_BYTES_MAX = 64
SEND_VALUE_BYTES_MAX = 4_096
STRIPS_MAX = 131_072
"""Strips of one re-pack: no more than a posting has runs."""
NAMES_MAX = 64
"""Short lists of names: features, states to filter by."""
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
"""A message within another one, which is bounded by itself when it is read."""
TEXT_BYTES_MAX = 256
"""Bound on labels such as request ids, so that no caller stores a novel here."""
SALT_BYTES_MAX = 4_096
"""Of texts that are hashed and not kept."""
SECRET_BYTES_MAX = 4_096
"""Of ids, keys and tokens: far more than any has that is right."""
METADATA_BYTES_MAX = 1 << 20
"""Of what a library says of its endpoint."""
DIGESTS_BYTES_MAX = 1 << 22
"""A chain over two million tokens."""
ADDRESS_MAX = 2**53 - 1
"""Of a process: above what the kernel gives out unless it is asked to, and what every language can hold."""


def check_count(field: str, count: int, most: int) -> None:
    """Raises OutOfRange (LIMIT_EXCEEDED) for more rows than a message may have."""
    if count > most:
        raise OutOfRange(
            Reason.LIMIT_EXCEEDED,
            f"{field} has {count} rows; the limit is {most}",
            violations=(FieldViolation(field, f"at most {most} in one message"),),
            metadata={"limit": str(most)},
        )


def check_counts(field: str, lists: Iterable[Sized], most: int) -> None:
    """As `check_count`, for all rows of a field that several rows have."""
    check_count(field, sum(map(len, lists)), most)


def check_blocks(field: str, lists: Sequence[Sequence[common_pb2.GroupBlocks]], rows: int, ids: int) -> None:
    """Raises OutOfRange (LIMIT_EXCEEDED) for more rows of blocks than `rows`, or more than `ids` blocks in all of them:
    counted before anything is made of their runs.
    """
    check_counts(field, lists, rows)
    named = sum(blocks_named(row.runs.counts) for some in lists for row in some)
    if named > ids:
        raise OutOfRange(
            Reason.LIMIT_EXCEEDED,
            f"{field} names {named} blocks; the limit is {ids}",
            violations=(FieldViolation(field, f"at most {ids} blocks in one message"),),
            metadata={"limit": str(ids)},
        )


def blocks_named(counts: Sequence[int]) -> int:
    """How many blocks runs name, by the repeated field of their lengths."""
    return int(np.asarray(counts).sum()) if len(counts) > FEW_IDS else sum(counts)


def text(field: str, value: str, most: int = TEXT_BYTES_MAX) -> str:
    """A text that is kept. Raises InvalidRequest for a long one."""
    if len(value) > most or len(value.encode()) > most:
        raise invalid(field, f"has at most {most} bytes")
    return value
