"""The core's answers to calls between leads, written into replies in place: a message that is put into another one is
copied with all that it holds.
"""

from kvgrpc.core import actions
from kvgrpc.core.events import Opened
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.wire.packed import put_runs, unpacked_checksums
from kvgrpc.wire.values import duration, error_row, reason


def openings(answer: actions.Openings, into: peer_pb2.OpenAccessResponse) -> None:
    """Writes the answer to OpenAccess."""
    for row in answer.rows:
        made = into.results.add()
        if isinstance(row, Opened):
            _opened(row, made)
        else:
            made.failure.CopyFrom(error_row(row))


def verdicts(answer: actions.Verdicts, into: peer_pb2.SettleAccessResponse) -> None:
    """Writes the answer to SettleAccess."""
    for row in answer.rows:
        verdict = peer_pb2.VERDICT_VALID if row.valid else peer_pb2.VERDICT_STALE
        into.results.add(verdict=verdict, reason=reason(row.reason), message=row.message)


def closings(answer: actions.Closings, into: peer_pb2.CloseAccessResponse) -> None:
    """Writes the answer to CloseAccess."""
    for was_open in answer.rows:
        into.results.add(was_open=was_open)


def checksums(answer: actions.Checksums, into: peer_pb2.ChecksumBlocksResponse) -> None:
    """Writes the answer to ChecksumBlocks: the inverse of `accesses.checksums`."""
    for rank, values in enumerate(answer.by_rank):
        into.ranks.add(rank=rank, values=unpacked_checksums(values))


def send_under_way(answer: actions.SendUnderWay, into: peer_pb2.PostSendResponse) -> None:
    """Writes the answer to PostSend: the inverse of `sends.send_under_way`."""
    for key, value in answer.values:
        into.values.add(key=key, value=value)


def _opened(row: Opened, into: peer_pb2.OpenedAccess) -> None:
    for group, ids in row.blocks:  # also groups without blocks: a destination that has all tokens says so for each
        put_runs(ids, into.blocks.add(group=group).runs)
    into.token_count = row.token_count
    into.offer_tokens = row.offer_tokens
    into.remaining.CopyFrom(duration(row.remaining_s))
    into.ttl.CopyFrom(duration(row.ttl_s))
    into.memory_generation = row.memory_generation
    into.transfer_id = row.transfer_id
    into.lease_id = row.lease_id
