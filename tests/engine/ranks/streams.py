"""ConnectRank as a stranger speaks it: any messages, in any order."""

import queue
from typing import Any

import grpc

from kvgrpc.peer.v1 import rank_pb2
from tests.engine.support import WAIT_S, Lead
from tests.service.api import Refusal, read_refusal
from tests.service.contract import errors_of

METHOD = "/kvgrpc.peer.v1.RankService/ConnectRank"


class RankStream:
    """One stream. It sends no beats: what the lead says of silence is said of it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._unsent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        made = channel.stream_stream(
            METHOD,
            request_serializer=bytes,
            response_deserializer=rank_pb2.ConnectRankResponse.FromString,
        )
        self.call: Any = made(iter(self._unsent.get, None), timeout=2 * WAIT_S)

    def say(self, message: bytes | None = None, **fields: Any) -> None:
        self._unsent.put(rank_pb2.ConnectRankRequest(**fields).SerializeToString() if message is None else message)

    def hear(self) -> rank_pb2.ConnectRankResponse:
        """The next message that says something. Raises the refusal."""
        while True:
            message = next(self.call)
            assert isinstance(message, rank_pb2.ConnectRankResponse)
            if message.ByteSize():
                return message

    def last(self) -> Refusal | None:
        """Hears all to the end; why it is refused, which the schema lists, if it is."""
        try:
            while True:
                self.hear()
        except grpc.RpcError as error:
            found = read_refusal(METHOD, error)
            assert (found.code, found.reason) in errors_of(METHOD), found
            return found
        except StopIteration:
            return None

    def refusal(self) -> Refusal:
        """Why the stream ended. Fails where it ended in order."""
        found = self.last()
        assert found is not None, "the stream ended in order"
        return found

    def end(self) -> None:
        """Ends it in order."""
        self._unsent.put(None)

    def cut(self) -> None:
        """Ends it at once. Idempotent."""
        self.call.cancel()
        self._unsent.put(None)


def stream_to(lead: Lead) -> RankStream:
    return RankStream(lead.api.plain)
