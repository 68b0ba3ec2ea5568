"""Bounds on what a message may hold. Counts are checked before anything is made of the message.

A message of 4 MB has room for two million empty rows, or for one text of that length. Rows cost time of the loop that
handles everything, and texts cost memory for as long as they are kept.
"""

from collections.abc import Iterable, Sequence, Sized

import numpy as np

from kvgrpc.core.values.block_ids import FEW_IDS
from kvgrpc.core.values.endpoints import SPANS_MAX
from kvgrpc.core.values.ids import LABEL_BYTES_MAX
from kvgrpc.errors import invalid, too_many
from kvgrpc.v1 import common_pb2

ROWS_MAX = 256
"""Maximum rows of a batch between leads: far more than any lead sends."""
CALLS_MAX = 4_096
"""Maximum calls in one message of a stream between leads."""
FRAME_ROWS_MAX = 65_536
"""Maximum calls, or reports, in one frame of a session."""
RANGES_MAX = 16_384
"""Maximum layer ranges, data path names, or rows of blocks for checksums, in one message."""
RUNS_MAX = 1 << 20
"""Maximum runs of blocks in one message."""
BLOCKS_MAX = 1 << 20
"""Maximum blocks that all runs of one message name: 16 times the limit of a request, for the calls of a step."""
GROUPS_MAX = 256
"""Maximum groups of a pool, and therefore rows of one list of blocks."""
BLOCK_ROWS_MAX = 65_536
"""Maximum rows of all lists of blocks in one message."""
REGIONS_MAX = 4_096
"""Maximum regions of a pool."""
SEGMENTS_MAX = SPANS_MAX
"""Maximum segments of all endpoints in one message."""
DIFFERENCES_MAX = 4_096
"""Maximum number of fields in which two engines differ."""
ENDPOINTS_MAX = 4_096
"""Maximum ranks of an engine, each with one endpoint."""
IDS_MAX = 65_536
"""Maximum ids of transfers in one call."""
TOKENS_MAX = 1 << 20
"""Maximum tokens of one content that lists its tokens. A digest chain may be longer."""
ITEMS_MAX = 8_192
"""Maximum multimodal items of one content."""
SEND_RUNS_MAX = 131_072
"""Maximum runs of one send, the same as for a posting."""
SEND_VALUES_MAX = 4
"""Maximum number of values that one half of a process group tells the other."""
SEND_KEY_BYTES_MAX = 64
SEND_VALUE_BYTES_MAX = 4_096
STRIPS_MAX = 131_072
"""Maximum strips of one re-pack, the same as for a posting's runs."""
NAMES_MAX = 64
"""Maximum length of short lists of names, such as features, or states to filter by."""
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
"""Maximum bytes of a message within another one, whose own bounds are checked when it is read."""
TEXT_BYTES_MAX = LABEL_BYTES_MAX
"""Maximum bytes of labels such as request ids, which the server stores."""
SALT_BYTES_MAX = 4_096
"""Maximum bytes of texts that are hashed and not kept."""
SECRET_BYTES_MAX = 4_096
"""Maximum bytes of ids, keys and tokens: far more than any valid one has."""
METADATA_BYTES_MAX = 1 << 20
"""Maximum bytes of a library's metadata for its endpoint."""
DIGESTS_BYTES_MAX = 1 << 22
"""Maximum bytes of a digest chain: over two million tokens."""
DETAIL_BYTES_MAX = 65_536
"""Maximum bytes of one detail of an error: of 16 wrong fields, with a note about each."""
ADDRESS_MAX = 2**53 - 1
"""Maximum address in a process. The kernel gives out higher ones only on request, and every language can hold it."""


def check_count(field: str, count: int, most: int) -> None:
    """Raises OutOfRange (LIMIT_EXCEEDED) for more rows than a message may have."""
    if count > most:
        raise too_many(f"{field} has {count} rows; the limit is {most}", most, field, "in one message")


def check_counts(field: str, lists: Iterable[Sized], most: int) -> None:
    """Does what `check_count` does, for the sum of a field's rows over several messages."""
    check_count(field, sum(map(len, lists)), most)


def check_named(field: str, lists: Sequence[Sequence[common_pb2.GroupBlocks]], ids: int) -> None:
    """Raises OutOfRange (LIMIT_EXCEEDED) for more than `ids` blocks in all lists. The blocks are counted before the
    runs are expanded.
    """
    named = sum([blocks_named(row.runs.counts) for some in lists for row in some])
    if named > ids:
        raise too_many(f"{field} names {named} blocks; the limit is {ids}", ids, field, "blocks in one message")


def blocks_named(counts: Sequence[int]) -> int:
    """Returns the number of blocks that runs name, from the repeated field of their lengths."""
    return int(np.asarray(counts).sum()) if len(counts) > FEW_IDS else sum(counts)


def text(field: str, value: str, most: int = TEXT_BYTES_MAX) -> str:
    """Returns a text that will be kept. Raises InvalidRequest if it is too long."""
    if len(value) > most or len(value.encode()) > most:
        raise invalid(field, f"has at most {most} bytes")
    return value
