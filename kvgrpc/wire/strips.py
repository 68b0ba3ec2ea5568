"""Conversion of re-packs to messages of a session, and back."""

from kvgrpc.core.values.strips import DIMENSIONS_MAX, Repack, Strip
from kvgrpc.session.v1 import rank_pb2
from kvgrpc.wire.bounds import STRIPS_MAX, check_count
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
    for name, numbers in (("shape", row.shape), ("src_steps", row.src_steps), ("dst_steps", row.dst_steps)):
        check_count(f"repack.strips.{name}", len(numbers), DIMENSIONS_MAX)
    shape, src_steps, dst_steps = tuple(row.shape), tuple(row.src_steps), tuple(row.dst_steps)
    return Strip(ids(row.src), ids(row.dst), shape, src_steps, dst_steps, row.run_bytes)
