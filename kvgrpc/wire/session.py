"""Conversion of a session's messages to the core's commands, reports and news, and back."""

from typing import TypeAlias

import numpy as np
from google.protobuf.duration_pb2 import Duration

from kvgrpc.core import actions, events
from kvgrpc.core.values.telemetry import MoveTelemetry
from kvgrpc.errors import note
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.v1 import pool_pb2
from kvgrpc.wire import sends
from kvgrpc.wire.bounds import NAMES_MAX, check_count
from kvgrpc.wire.endpoints import endpoint_from_proto, endpoint_to_proto
from kvgrpc.wire.values import block_lists, duration, failure, layer_ranges, packed_checksums, unpacked_checksums

_News: TypeAlias = (
    session_pb2.Received
    | session_pb2.PullOpened
    | session_pb2.LayersReceived
    | session_pb2.Failed
    | session_pb2.BlocksReturned
    | session_pb2.PartsReturned
)


def put_news(news: actions.EngineNews, into: session_pb2.Event) -> None:
    """Writes news for the engine in place, into an empty event."""
    if isinstance(news, actions.PushWantedNews):
        into.push_wanted.transfer_key = news.key
        return
    row: _News
    match news:
        case actions.ReceivedNews():
            row = into.received
            row.use_tokens = news.use_tokens
            if news.telemetry is not None:
                row.telemetry.CopyFrom(_telemetry(news.telemetry))
        case actions.PullOpenedNews():
            row = into.opened
            row.use_tokens = news.use_tokens
        case actions.LayersReceivedNews():
            row = into.layers_received
            row.layers_done.extend(layer_ranges(news.layers_done))
            row.part_epoch = news.part_epoch
        case actions.FailedNews():
            row = into.failed
            row.failure.CopyFrom(failure(news.failure))
            row.cancelled = news.cancelled
        case actions.BlocksReturnedNews():
            row = into.blocks_returned
            row.lease_id = news.lease_id
            row.telemetries.extend(map(_telemetry, news.telemetries))
        case actions.PartsReturnedNews():
            row = into.parts_returned
            row.lease_id = news.lease_id
    row.transfer_id, row.request_id = news.transfer_id, news.request_id


def _telemetry(value: MoveTelemetry) -> session_pb2.MoveTelemetry:
    wire, post = duration(value.wire_s), duration(value.post_s)
    return session_pb2.MoveTelemetry(moved_bytes=value.nbytes, descriptor_count=value.descriptors, wire=wire, post=post)


def telemetry_from_proto(value: session_pb2.MoveTelemetry) -> MoveTelemetry:
    return MoveTelemetry(value.moved_bytes, value.descriptor_count, _seconds(value.wire), _seconds(value.post))


def _seconds(value: Duration) -> float:
    """Returns a Duration in seconds, rounded once, so that a value survives the round trip."""
    return (value.seconds * 10**9 + value.nanos) / 1e9


def reclaimed_from_proto(value: pool_pb2.Reclaimed, groups: int) -> actions.Reclaimed:
    """Converts what a lead reclaimed from leases, for a pool of `groups` groups."""
    freed = dict(block_lists(value.freed_blocks.groups, sum(sum(row.runs.counts) for row in value.freed_blocks.groups)))
    later = []
    for row in value.later_leases:
        counts = {count.group: count.block_count for count in row.group_block_counts}
        in_s = row.soft_in.ToNanoseconds() / 1e9
        later.append(actions.Later(in_s, tuple(counts.get(group, 0) for group in range(groups))))
    return actions.Reclaimed(
        value.enough,
        tuple(actions.ReclaimedLease(row.lease_id, row.transfer_id, row.request_id) for row in value.leases),
        value.lease_count,
        tuple(freed.get(group, np.empty(0, dtype=np.int64)) for group in range(groups)),
        tuple(later),
        value.claimed_lease_count,
    )


def peer_rank_of(
    rank: int, message: rank_pb2.ConnectCommand | rank_pb2.PostCommand | rank_pb2.ConnectReport | rank_pb2.ProcessReport
) -> int:
    """Returns the peer's rank in a command to a rank, or in its report; the rank's own number if it is not stated."""
    return message.peer_rank if message.HasField("peer_rank") else rank


def report_to_event(rank: int, report: rank_pb2.RankReport) -> events.Event | None:
    """Converts a rank's report to an event for the node. Returns None for a report of a newer worker."""
    event: events.Event | None = None
    match report.WhichOneof("report"):
        case "offer":
            event = events.EndpointOffered(rank, report.offer.key, endpoint_from_proto(report.offer.endpoint))
        case "connect":
            row = report.connect
            check_count("rejected", len(row.rejected), NAMES_MAX)
            rejected = tuple((note(path.data_path), note(path.why)) for path in row.rejected)
            path, why, peer_rank = note(row.data_path), note(row.why), peer_rank_of(rank, row)
            event = events.PeerMapped(rank, row.peer, path, why, rejected, row.attempt, peer_rank, row.permanent)
        case "posting":
            end = report.posting
            quiesced = end.done or end.quiesced
            wire_s, post_s, why = _seconds(end.wire), _seconds(end.post), note(end.message)
            event = events.PostingEnded(
                end.posting_id, end.done, end.nbytes, wire_s, why, quiesced, end.own_at_rest, post_s
            )
        case "step":
            event = step_of(rank, report.step)
        case "process":
            end_of = report.process
            event = events.ProcessEnded(rank, end_of.peer, end_of.drained, peer_rank_of(rank, end_of))
        case "rekey":
            event = events.Rekeyed(rank, note(report.rekey.message))
        case "sum":
            event = events.ChecksumsComputed(
                rank, report.sum.name, packed_checksums(report.sum.values), note(report.sum.message)
            )
        case "copy_out":
            event = events.CopiedOut(rank, report.copy_out.name, note(report.copy_out.message))
        case _:
            event = sends.report_to_event(rank, report)
    return event


def step_of(rank: int, report: rank_pb2.StepReport) -> events.StepDone:
    """Converts the report that a step, or some layers of it, is done on a rank."""
    layers = (report.layers.first, report.layers.count) if report.HasField("layers") else None
    return events.StepDone(rank, report.step, layers)


def step_report(step: int, layers: tuple[int, int] | None = None) -> rank_pb2.StepReport:
    """Makes the report that a step, or some layers of it, is done: the inverse of `step_of`."""
    report = rank_pb2.StepReport(step=step)
    if layers is not None:
        report.layers.first, report.layers.count = layers
    return report


def event_to_report(event: events.Event) -> rank_pb2.RankReport:
    """Converts an event to a report, in the worker: the inverse of `report_to_event`."""
    report = rank_pb2.RankReport()
    match event:
        case events.EndpointOffered():
            report.offer.CopyFrom(rank_pb2.OfferReport(key=event.key, endpoint=endpoint_to_proto(event.endpoint)))
        case events.PeerMapped():
            rejected = [rank_pb2.RejectedPath(data_path=name, why=why) for name, why in event.rejected]
            report.connect.CopyFrom(
                rank_pb2.ConnectReport(
                    peer=event.peer,
                    data_path=event.data_path,
                    why=event.why,
                    rejected=rejected,
                    attempt=event.attempt,
                    peer_rank=event.peer_rank,
                    permanent=event.permanent,
                )
            )
        case events.PostingEnded():
            report.posting.CopyFrom(
                rank_pb2.PostingReport(
                    posting_id=event.posting_id,
                    done=event.done,
                    nbytes=event.nbytes,
                    wire=duration(event.wire_s),
                    message=event.message,
                    quiesced=event.quiesced,
                    own_at_rest=event.own_at_rest,
                    post=duration(event.post_s),
                )
            )
        case events.StepDone():
            report.step.CopyFrom(step_report(event.step, event.layers))
        case events.ProcessEnded():
            process = rank_pb2.ProcessReport(peer=event.peer, drained=event.drained, peer_rank=event.peer_rank)
            report.process.CopyFrom(process)
        case events.Rekeyed():
            report.rekey.CopyFrom(rank_pb2.RekeyReport(message=event.message))
        case events.ChecksumsComputed():
            values = unpacked_checksums(event.values)
            report.sum.CopyFrom(rank_pb2.SumReport(name=event.name, values=values, message=event.message))
        case events.CopiedOut():
            report.copy_out.CopyFrom(rank_pb2.CopyOutReport(name=event.name, message=event.message))
        case _:
            sends.put_report(event, report)
    return report
