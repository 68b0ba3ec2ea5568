"""Commands of a lead, performed by the mover of a worker's rank."""

from collections.abc import Callable
from dataclasses import replace

from kvgrpc.core.actions import AnswerSend, Operation, Send
from kvgrpc.datapath.local_rank import LocalRank
from kvgrpc.session.v1 import rank_pb2
from kvgrpc.wire import sends, session as wire
from kvgrpc.wire.endpoints import endpoint_from_proto


def perform(rank: int, mover: LocalRank, command: rank_pb2.RankCommand) -> None:
    """Performs one command. Ignores an unknown command of a newer lead, which knows from the attach what this worker
    can.
    """
    name = command.WhichOneof("command")
    if name in _COMMANDS:
        _COMMANDS[name](rank, mover, command)


def _connect(rank: int, mover: LocalRank, command: rank_pb2.RankCommand) -> None:
    connect = command.connect
    endpoint = replace(endpoint_from_proto(connect.endpoint), rank=wire.peer_rank_of(rank, connect))
    mover.map_peer(connect.peer, endpoint, connect.attempt, tuple(connect.allowed))


def _disconnect(_: int, mover: LocalRank, command: rank_pb2.RankCommand) -> None:
    disconnect = command.disconnect
    peer_rank = disconnect.peer_rank if disconnect.HasField("peer_rank") else None
    mover.unmap_peer(disconnect.peer, watch=disconnect.watch, gone=disconnect.gone, peer_rank=peer_rank)


def _expect(_: int, mover: LocalRank, command: rank_pb2.RankCommand) -> None:
    operation = Operation.WRITE if command.expect.writes else Operation.READ
    mover.expect(command.expect.access, command.expect.open, operation)


def _send(rank: int, mover: LocalRank, command: rank_pb2.RankCommand) -> None:
    mover.send(Send(rank, command.send.name, command.send.peer, sends.ask_of(rank, command.send)))


def _answer_send(rank: int, mover: LocalRank, command: rank_pb2.RankCommand) -> None:
    answer = command.send_answer
    mover.answer_send(AnswerSend(rank, answer.peer, sends.answer_of(answer)))


_COMMANDS: dict[str, Callable[[int, LocalRank, rank_pb2.RankCommand], None]] = {
    "offer": lambda _, mover, command: mover.offer(command.offer.key, command.offer.peer),
    "connect": _connect,
    "disconnect": _disconnect,
    "post": lambda rank, mover, command: mover.post(wire.post_of(rank, command.post)),
    "expect": _expect,
    "await_end": lambda _, mover, command: mover.await_end(command.await_end.peer),
    "rekey": lambda _, mover, __: mover.rekey(),
    "sum": lambda _, mover, command: mover.sum(command.sum.name, wire.pieces_of(command.sum)),
    "copy_out": lambda _, mover, command: mover.copy_out(command.copy_out.name, wire.pieces_of(command.copy_out)),
    "send": _send,
    "send_answer": _answer_send,
}
