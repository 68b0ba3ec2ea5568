"""Conversion of asks between ranks to send, and of their answers: between leads, and between a lead and its ranks."""

from collections.abc import Iterable, Sequence

import numpy as np

from kvgrpc.core import events
from kvgrpc.core.actions import AnswerSend, Send
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.layout import BYTES_MAX
from kvgrpc.core.values.sends import SendAnswer, SendAsk, Values
from kvgrpc.errors import invalid, note
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.session.v1 import rank_pb2
from kvgrpc.wire.bounds import (
    SEND_KEY_BYTES_MAX,
    SEND_RUNS_MAX,
    SEND_VALUE_BYTES_MAX,
    SEND_VALUES_MAX,
    check_count,
    text,
)
from kvgrpc.wire.values import ids, put_columns

Report = events.SendWanted | events.SendPosted | events.MeetingBegan


def post_send_request(access_id: bytes, ask: SendAsk) -> peer_pb2.PostSendRequest:
    request = peer_pb2.PostSendRequest(
        access_id=access_id, source_rank=ask.source_rank, rank=ask.rank, epoch=ask.epoch, sequence=ask.sequence
    )
    request.values.extend([peer_pb2.GroupValue(key=key, value=value) for key, value in ask.values])
    put_columns(request, offsets=ask.offsets, nbytes=ask.nbytes)
    return request


def post_send(request: peer_pb2.PostSendRequest, caller: peer_pb2.Caller, call: events.Call) -> events.PostSend:
    """Converts PostSend: the inverse of `post_send_request`. Raises OutOfRange and InvalidRequest if malformed."""
    _check(request.offsets, request.nbytes, request.values)
    if not request.sequence and request.offsets:
        raise invalid("offsets", "is empty where sequence is 0")
    if request.sequence and not request.offsets:
        raise invalid("offsets", "names a run where sequence is not 0")
    runs, values = (_offsets("offsets", request.offsets), _offsets("nbytes", request.nbytes)), _values(request.values)
    ask = SendAsk(request.source_rank, request.rank, request.epoch, request.sequence, *runs, values)
    return events.PostSend(call, caller.engine_id, caller.incarnation, request.access_id, ask)


def send_under_way(reply: peer_pb2.PostSendResponse) -> Values:
    """Converts the answer to PostSend: the inverse of `peer_calls.send_under_way`."""
    check_count("values", len(reply.values), SEND_VALUES_MAX)
    return _values(reply.values)


def put_send(action: Send, made: rank_pb2.SendCommand) -> None:
    """Writes the command to send bytes, or to make a process group, into an empty message."""
    ask = action.ask
    made.name, made.peer, made.peer_rank = action.name, action.peer, ask.rank
    made.epoch, made.sequence = ask.epoch, ask.sequence
    put_columns(made, offsets=ask.offsets, nbytes=ask.nbytes)
    made.values.extend(_send_values(ask.values))


def ask_of(rank: int, command: rank_pb2.SendCommand) -> SendAsk:
    """Converts a send command in the worker of the sending rank: the inverse of `put_send`."""
    runs, values = (ids(command.offsets), ids(command.nbytes)), _values(command.values)
    return SendAsk(rank, command.peer_rank, command.epoch, command.sequence, *runs, values)


def put_send_answer(action: AnswerSend, made: rank_pb2.SendAnswerCommand) -> None:
    """Writes the command that carries the answer to an ask into an empty message."""
    answer = action.answer
    made.peer, made.peer_rank = action.peer, answer.source_rank
    made.epoch, made.sequence = answer.epoch, answer.sequence
    made.values.extend(_send_values(answer.values))
    made.error, made.unknown, made.regroup = answer.error, not answer.known, answer.regroup
    made.permanent = answer.permanent


def answer_of(command: rank_pb2.SendAnswerCommand) -> SendAnswer:
    """Converts the answer to an ask: the inverse of `put_send_answer`."""
    return SendAnswer(
        command.peer_rank,
        command.epoch,
        command.sequence,
        _values(command.values),
        command.error,
        not command.unknown,
        command.regroup,
        command.permanent,
    )


def put_report(event: events.Event, into: rank_pb2.RankReport) -> None:
    """Writes a report into an empty message. Raises TypeError if the event is no report."""
    match event:
        case events.SendWanted():
            made, ask = into.send_wanted, event.ask
            made.peer, made.peer_rank, made.posting_id = event.peer, ask.source_rank, event.posting_id
            made.epoch, made.sequence = ask.epoch, ask.sequence
            put_columns(made, offsets=ask.offsets, nbytes=ask.nbytes)
            made.values.extend(_send_values(ask.values))
        case events.SendPosted():
            posted = into.send_posted
            posted.name, posted.message, posted.permanent = event.name, event.message, event.permanent
            posted.values.extend(_send_values(event.values))
        case events.MeetingBegan():
            into.meeting.peer, into.meeting.peer_rank = event.peer, event.peer_rank
            into.meeting.attempt = event.attempt
        case _:
            raise TypeError(f"{type(event).__name__} is no report of a rank")


def report_to_event(rank: int, report: rank_pb2.RankReport) -> Report | None:
    """Converts a report: the inverse of `put_report`. Returns None for a report of a newer worker."""
    match report.WhichOneof("report"):
        case "send_wanted":
            row = report.send_wanted
            _check(row.offsets, row.nbytes, row.values)
            ask = SendAsk(
                row.peer_rank,
                rank,
                row.epoch,
                row.sequence,
                _offsets("offsets", row.offsets),
                _offsets("nbytes", row.nbytes),
                _values(row.values),
            )
            return events.SendWanted(rank, row.peer, row.posting_id, ask)
        case "send_posted":
            posted = report.send_posted
            check_count("values", len(posted.values), SEND_VALUES_MAX)
            return events.SendPosted(rank, posted.name, _values(posted.values), note(posted.message), posted.permanent)
        case "meeting":
            meeting = report.meeting
            return events.MeetingBegan(rank, meeting.peer, meeting.attempt, meeting.peer_rank)
    return None


def _offsets(field: str, values: Sequence[int]) -> Ids:
    """Returns offsets or lengths as an array. Raises InvalidRequest if one is larger than any memory."""
    found = np.asarray(values, dtype=np.uint64)
    if len(found) and int(found.max()) > BYTES_MAX:
        raise invalid(field, f"is at most {BYTES_MAX}")
    return found.astype(np.int64)


def _check(offsets: Sequence[int], nbytes: Sequence[int], values: Sequence[object]) -> None:
    check_count("offsets", len(offsets), SEND_RUNS_MAX)
    check_count("values", len(values), SEND_VALUES_MAX)
    if len(offsets) != len(nbytes):
        raise invalid("nbytes", f"has as many rows as offsets, which has {len(offsets)}")


def _values(rows: Iterable[peer_pb2.GroupValue | rank_pb2.SendValue]) -> Values:
    """Converts values. Raises InvalidRequest for long ones: they are kept while a process group is made."""
    return tuple((text("values.key", row.key, SEND_KEY_BYTES_MAX), _value(row.value)) for row in rows)


def _value(value: bytes) -> bytes:
    if len(value) > SEND_VALUE_BYTES_MAX:
        raise invalid("values.value", f"has at most {SEND_VALUE_BYTES_MAX} bytes")
    return value


def _send_values(values: Values) -> list[rank_pb2.SendValue]:
    return [rank_pb2.SendValue(key=key, value=value) for key, value in values]
