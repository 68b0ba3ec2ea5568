"""ConnectRank as a stranger uses it: any messages, in any order."""

import queue
from typing import Any

import grpc

from kvgrpc.peer.v1 import rank_pb2
from tests.engine.support import WAIT_S, Lead
from tests.service.api import Refusal, read_refusal
from tests.service.contract import errors_of

METHOD = "/kvgrpc.peer.v1.RankService/ConnectRank"


class RankStream:
    """A ConnectRank stream that sends no beats, so that the lead's limit on silence applies to it."""

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
        """Returns the next message that is not empty. Raises the stream's error."""
        while True:
            message = next(self.call)
            assert isinstance(message, rank_pb2.ConnectRankResponse)
            if message.ByteSize():
                return message

    def last(self) -> Refusal | None:
        """Reads the stream to its end. Returns its refusal, which the schema must list, or None."""
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
        """Returns the refusal that ended the stream. Fails if it ended in order."""
        found = self.last()
        assert found is not None, "the stream ended in order"
        return found

    def end(self) -> None:
        """Ends the stream in order."""
        self._unsent.put(None)

    def cut(self) -> None:
        """Cancels the stream at once. Idempotent."""
        self.call.cancel()
        self._unsent.put(None)


def stream_to(lead: Lead) -> RankStream:
    return RankStream(lead.api.plain)
