"""Conversion of the node's commands to a rank, for a rank whose mover runs in a worker, and back in the worker."""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from kvgrpc.core.actions import (
    AnswerSend,
    AwaitEnd,
    ComputeChecksums,
    CopyOut,
    Expect,
    MakeOffer,
    MapPeer,
    Operation,
    Post,
    RankAction,
    Rekey,
    Send,
    UnmapPeer,
)
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.core.values.strips import DIMENSIONS_MAX, Repack, Strip
from kvgrpc.errors import Reason, Unimplemented
from kvgrpc.session.v1 import rank_pb2
from kvgrpc.wire import sends
from kvgrpc.wire.bounds import STRIPS_MAX, check_count
from kvgrpc.wire.endpoints import endpoint_from_proto, endpoint_to_proto
from kvgrpc.wire.enums import numbers
from kvgrpc.wire.session import peer_rank_of
from kvgrpc.wire.values import ids, put_columns


def put_repack(value: Repack, into: rank_pb2.RepackCommand) -> None:
    """Writes a re-pack in place, into an empty message."""
    into.staging_bytes = value.staging_bytes
    for strip in value.strips:
        row = into.strips.add(
            shape=strip.shape, src_steps=strip.src_steps, dst_steps=strip.dst_steps, run_bytes=strip.run_bytes
        )
        put_columns(row, src=strip.src, dst=strip.dst)


def repack_from_proto(value: rank_pb2.RepackCommand) -> Repack:
    """Converts a re-pack. Raises OutOfRange (LIMIT_EXCEEDED) for more strips or dimensions than allowed.

    Code that knows the memory checks that the strips make sense, and what they cover.
    """
    check_count("repack.strips", len(value.strips), STRIPS_MAX)
    return Repack(tuple(map(_strip, value.strips)), value.staging_bytes)


def _strip(row: rank_pb2.Strip) -> Strip:
    for name, values in (("shape", row.shape), ("src_steps", row.src_steps), ("dst_steps", row.dst_steps)):
        check_count(f"repack.strips.{name}", len(values), DIMENSIONS_MAX)
    shape, src_steps, dst_steps = tuple(row.shape), tuple(row.src_steps), tuple(row.dst_steps)
    return Strip(ids(row.src), ids(row.dst), shape, src_steps, dst_steps, row.run_bytes)


_OPERATION = numbers(rank_pb2.PostOperation, Operation)
_OPERATIONS = {value: operation for operation, value in _OPERATION.items()}


def command_of(  # noqa: C901 - one case for each command
    action: RankAction, allowed: Sequence[str] = ()
) -> rank_pb2.RankCommand:
    """Converts an action to the command of a worker's rank. `allowed`: the data paths for a MapPeer that names none."""
    made = rank_pb2.RankCommand()  # filled in place: a message that is put into another one is copied
    match action:
        case MakeOffer():
            made.offer.key, made.offer.peer = action.key, action.peer
        case MapPeer():
            made.connect.peer, made.connect.attempt = action.peer, action.attempt
            made.connect.peer_rank = action.endpoint.rank
            made.connect.endpoint.CopyFrom(endpoint_to_proto(action.endpoint))
            made.connect.allowed.extend(allowed if action.allowed is None else action.allowed)
        case UnmapPeer():
            end = rank_pb2.DisconnectCommand(
                peer=action.peer, watch=action.watch, gone=action.gone, peer_rank=action.peer_rank
            )
            made.disconnect.CopyFrom(end)
        case Post():
            _put_post(action, made.post)
        case Expect():
            made.expect.access, made.expect.open, made.expect.writes = action.access, action.open, action.writes
        case AwaitEnd():
            made.await_end.peer = action.peer
        case Rekey():
            made.rekey.SetInParent()
        case ComputeChecksums():
            _put_sum(action, made.sum)
        case CopyOut():
            made.copy_out.name = action.name
            put_columns(made.copy_out, offsets=action.pieces.offsets, nbytes=action.pieces.nbytes)
        case Send():
            sends.put_send(action, made.send)
        case AnswerSend():
            sends.put_send_answer(action, made.send_answer)
        case _:
            assert_never(action)
    return made


def action_of(  # noqa: C901, PLR0911 - one case for each command
    rank: int, command: rank_pb2.RankCommand
) -> RankAction | None:
    """Converts a command in the worker of a rank: the inverse of `command_of`. Returns None for a command of a newer
    lead, which knows from the attach what this worker can. Raises what `post_of` raises.
    """
    match command.WhichOneof("command"):
        case "offer":
            return MakeOffer(rank, command.offer.key, command.offer.peer)
        case "connect":
            connect = command.connect
            endpoint = replace(endpoint_from_proto(connect.endpoint), rank=peer_rank_of(rank, connect))
            return MapPeer(rank, connect.peer, endpoint, connect.attempt, tuple(connect.allowed))
        case "disconnect":
            end = command.disconnect
            return UnmapPeer(rank, end.peer, end.watch, end.gone, end.peer_rank if end.HasField("peer_rank") else None)
        case "post":
            return post_of(rank, command.post)
        case "expect":
            return Expect(command.expect.access, command.expect.open, command.expect.writes)
        case "await_end":
            return AwaitEnd(rank, command.await_end.peer)
        case "rekey":
            return Rekey(rank)
        case "sum":
            return ComputeChecksums(rank, command.sum.name, _pieces_of(command.sum))
        case "copy_out":
            return CopyOut(rank, command.copy_out.name, _pieces_of(command.copy_out))
        case "send":
            return Send(rank, command.send.name, command.send.peer, sends.ask_of(rank, command.send))
        case "send_answer":
            return AnswerSend(rank, command.send_answer.peer, sends.answer_of(command.send_answer))
        case _:
            return None


def post_of(rank: int, command: rank_pb2.PostCommand) -> Post:
    """Converts a post command. The worker does not learn the transfer.

    Raises Unimplemented (FEATURE_UNAVAILABLE) if the operation is missing or of a newer lead, and OutOfRange
    (LIMIT_EXCEEDED) for more strips than a re-pack may have.
    """
    checksums = ComputeChecksums(rank, command.sum.name, _pieces_of(command.sum)) if command.HasField("sum") else None
    return Post(
        rank,
        command.posting_id,
        command.peer,
        Runs(ids(command.src), ids(command.dst), ids(command.nbytes)),
        transfer_id="",
        operation=_operation_of(command),
        checksums=checksums,
        peer_rank=peer_rank_of(rank, command),
        repack=repack_from_proto(command.repack) if command.HasField("repack") else None,
    )


def _put_post(post: Post, made: rank_pb2.PostCommand) -> None:
    made.posting_id, made.peer, made.peer_rank = post.posting_id, post.peer, post.peer_rank
    made.operation = _OPERATION[post.operation] if post.repack is None else rank_pb2.POST_OPERATION_READ_AND_REPACK
    put_columns(made, src=post.runs.src, dst=post.runs.dst, nbytes=post.runs.nbytes)
    if post.repack is not None:
        put_repack(post.repack, made.repack)
    if post.checksums is not None:
        _put_sum(post.checksums, made.sum)


def _put_sum(action: ComputeChecksums, made: rank_pb2.SumCommand) -> None:
    pieces = action.pieces
    made.name = action.name
    put_columns(made, offsets=pieces.offsets, nbytes=pieces.nbytes, counts=pieces.counts)


def _pieces_of(command: rank_pb2.SumCommand | rank_pb2.CopyOutCommand) -> Pieces:
    counts = command.counts if isinstance(command, rank_pb2.SumCommand) else ()
    return Pieces(ids(command.offsets), ids(command.nbytes), ids(counts))


def _operation_of(command: rank_pb2.PostCommand) -> Operation:
    repacks = command.operation == rank_pb2.POST_OPERATION_READ_AND_REPACK
    known = Operation.READ if repacks else _OPERATIONS.get(command.operation)
    if known is not None and repacks is command.HasField("repack"):
        return known
    raise Unimplemented(
        Reason.FEATURE_UNAVAILABLE,
        f"posting {command.posting_id} is neither a READ nor a WRITE, or a re-pack and none: {command.operation}",
    )
