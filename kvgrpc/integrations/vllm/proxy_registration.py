"""Registering: makes an engine known to a proxy for several prefill and decode engines, as vLLM's connector over NCCL
does. Every 3 s a message over ZeroMQ says where the engine serves HTTP, and where its lead is.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

EVERY_S = 3.0
"""Interval of messages, in seconds: proxies forget an engine that they did not hear of for 5 s."""
KINDS = {"kv_producer": "P", "kv_consumer": "D"}
"""Registered kinds of engines, by `kv_role`."""


@dataclass(frozen=True)
class Proxy:
    """A proxy that listens for engines."""

    address: str
    kind: str
    """Registered kind of this engine: P or D."""
    http_port: int

    @classmethod
    def of(cls, transfer: "KVTransferConfig", ip: str, port: int, http_port: int) -> "Proxy | None":
        """Returns the proxy of a configuration; None: there is none. Raises ValueError for an incomplete one."""
        if not (ip or port or http_port):
            return None
        if not (ip and port and http_port):
            raise ValueError(
                "kv_connector_extra_config: to register with a proxy takes proxy_ip, proxy_port, and http_port, which "
                "is vLLM's own --port"
            )
        kind = KINDS.get(transfer.kv_role or "")
        if kind is None:
            raise ValueError(
                f"kv_role: an engine registers with a proxy as {' or '.join(KINDS)}; this one is {transfer.kv_role}"
            )
        return cls(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", kind, http_port)


class ProxyRegistration:
    """The registration of one engine, by a thread that runs until `close`."""

    def __init__(self, proxy: Proxy, lead: str) -> None:
        """`lead`: address at which other engines reach the lead of this engine, or of its rank 0."""
        self._proxy, self._lead = proxy, lead
        host = lead.rpartition(":")[0]
        said = {"type": proxy.kind, "http_address": f"{host}:{proxy.http_port}", "zmq_address": lead}
        self._message = msgspec.msgpack.encode(said)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgrpc-register", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the messages to the proxy. Idempotent."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        import zmq

        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.IDENTITY, self._lead.encode())
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 1)
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(f"tcp://{self._proxy.address}")
            while not self._over.is_set():
                with suppress(zmq.Again):  # the proxy is not there; it gets the next message
                    socket.send(self._message, zmq.DONTWAIT)
                self._over.wait(EVERY_S)
