"""Two engines that move named tensors, and raw Gloo beside them."""

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, Self

from bench.plan import environment_of
from bench.stages.hosts import Host
from bench.stages.raw_pairs import GlooPair
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.errors import InternalError, Reason


class Stores:
    """Source and destination, each in a process with a lead of its own. Use it as a context manager."""

    def __init__(self, data_path: str, tensor_bytes: int, count: int, *, room: int) -> None:
        """Starts both. The destination's store has room for `room` tensors, the source's for all."""
        self._tensor_bytes, self._count = tensor_bytes, count
        with ExitStack() as ends:
            environment = environment_of(data_path)
            self._source, self._destination = (
                ends.enter_context(closing(Host("store", environment))) for _ in range(2)
            )
            addresses = [
                host.ask(
                    "start", data_path=data_path, store_bytes=tensors * tensor_bytes, tensor_bytes=tensor_bytes,
                    count=count,
                )["address"]
                for host, tensors in ((self._source, count), (self._destination, room))
            ]  # fmt: skip
            self._source_address, self._destination_address = addresses
            self._ends = ends.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def check(self) -> None:
        """Raises InternalError unless the bytes that arrive are those that were put."""
        with self._request() as key:
            self._source.ask("keep", key=key)
            if not self._destination.ask("check", key=key, source=self._source_address)["equal"]:
                raise InternalError(Reason.INTERNAL, "other bytes than those that were put came")

    def put_s(self, gets_at_once: int, *, at_once: bool, in_place: bool = False) -> float:
        """Returns the seconds from the first put until the destination has had the last tensor. The destination gets
        tensors in order, `gets_at_once` at a time. With `in_place`, the source has computed them in its store.
        """
        with self._request() as key:
            put, got = self._both(
                lambda: self._source.ask(
                    "put", key=key, to=self._destination_address, at_once=at_once, in_place=in_place
                ),
                lambda: self._destination.ask("get", key=key, source="", at_once=gets_at_once),
            )
            return float(got["ended_ns"] - put["began_ns"]) / 1e9

    def fetch_s(self, gets_at_once: int) -> float:
        """Returns the seconds that the destination takes to fetch what the source keeps, `gets_at_once` at a time."""
        with self._request() as key:
            self._source.ask("keep", key=key)
            got = self._destination.ask("get", key=key, source=self._source_address, at_once=gets_at_once)
            return float(got["ended_ns"] - got["began_ns"]) / 1e9

    def _request(self) -> "_Request":
        return _Request(self._source, self._destination)

    @staticmethod
    def _both(*work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(work)) as threads:
            return [future.result() for future in [threads.submit(one) for one in work]]


class _Request:
    """One request of the two engines: its transfer key, which both release at the end."""

    def __init__(self, *hosts: Host) -> None:
        self._hosts, self._key = hosts, secrets.token_hex(16)

    def __enter__(self) -> str:
        return self._key

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.ask("release", key=self._key)


class RawStores:
    """Raw Gloo between two processes with `nbytes` of memory each. Use it as a context manager."""

    def __init__(self, nbytes: int) -> None:
        with ExitStack() as ends:
            memories = [ends.enter_context(closing(SharedMemory.create(nbytes))) for _ in range(2)]
            self._pair = ends.enter_context(closing(GlooPair({})))
            self._pair.attach(*(memory.fd for memory in memories))
            self._ends = ends.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def move_s(self, tensor_bytes: int, under_way: int) -> float:
        """Returns the seconds for the whole memory, in messages of a tensor's size."""
        return self._pair.move(message_bytes=tensor_bytes, under_way=under_way)
