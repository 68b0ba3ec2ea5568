"""Metrics and health over HTTP, for Prometheus and for the probes of Kubernetes.

    /metrics    what `readings` reads, as text of Prometheus or OpenMetrics
    /livez      200 while the event loop answers
    /readyz     200 while the lead takes new work, else 503 with the reason

Threads serve the requests, so that a stalled event loop is told. Each request asks the loop for what it needs. With TLS
the endpoint shows the lead's certificate and asks for none.

Strangers may reach the endpoint, so a connection has one request and a bounded time for it, the newest connection takes
the place of one that sends nothing, and scrapes in short order share one reading.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvgrpc.config import split_address
from kvgrpc.errors import Reason
from kvgrpc.service.address_in_use import AddressInUse
from kvgrpc.service.admission import TAKES_WORK, admission
from kvgrpc.service.histogram import Example, FrozenHistogram, Histogram
from kvgrpc.service.lead import Lead
from kvgrpc.service.metrics.families import Family, MetricKind
from kvgrpc.service.metrics.readings import HasStore, Labels, Metrics, Reading
from kvgrpc.service.metrics.records import LoopLag
from kvgrpc.tls import Tls

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

CONNECTIONS_MAX = 16
"""Maximum number of connections. One more ends the oldest one without a request; if all are answered, it is closed."""
REQUEST_S = 10.0
"""Maximum time for a connection to send its request, and for its caller to take the answer, in seconds."""
AGAIN_S = 0.5
"""Minimum time between two readings, in seconds. A reading holds the event loop for up to 10 ms."""
ANSWER_S = 5.0
"""Time for the event loop to answer, in seconds, after which it counts as stalled."""


def begin(lead: Lead, staging: HasStore, tls: Tls | None) -> "MetricsEndpoint | None":
    """Serves metrics where the configuration says so, and counts from now on. Returns None where it says nothing.
    Raises AddressInUse.
    """
    metrics = Metrics(lead, staging, tls)
    made = begin_at(lead.config.metrics, metrics, partial(_why_not_ready, lead), tls)
    if made is not None:
        lead.calls.counting = True
        lead.runner.on_end.append(metrics.transfers.hear)
    return made


def begin_at(
    where: str, metrics: "HasReadings", not_ready: Callable[[], str], tls: Tls | None
) -> "MetricsEndpoint | None":
    """Serves metrics at an address; None: it is empty. Raises AddressInUse."""
    if not where:
        return None
    try:
        made = MetricsEndpoint(split_address(where, "metrics"), metrics, not_ready, tls)
    except OSError as error:
        raise AddressInUse(Reason.INVALID_FIELD, f"cannot bind {where} for metrics: {error.strerror}") from error
    made.start()
    _log.info("metrics at %s", made.address)
    return made


def _why_not_ready(lead: Lead) -> str:
    state, why = admission(lead)
    return "" if state in TAKES_WORK else why


FrozenReading = tuple[Family, list[tuple[Labels, float | FrozenHistogram]]]


class HasReadings(Protocol):
    """The metrics of a server."""

    lag: LoopLag

    def read(self) -> Iterator[Reading]:
        """Yields all readings. Call it on the event loop."""


class MetricsEndpoint:
    """One HTTP server beside a lead. `not_ready` returns why the lead takes no new work, or an empty text."""

    def __init__(
        self, listen: tuple[str, int], metrics: HasReadings, not_ready: Callable[[], str], tls: Tls | None
    ) -> None:
        """Binds. Raises OSError. Call it on the lead's event loop."""
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self.not_ready = not_ready
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_OnLoop(self))
        ProcessCollector(registry=self.registry)
        self._server = _ScrapeServer(listen, self, tls)
        host, port = listen[0], self._server.server_address[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Address that is bound."""
        self._read: list[FrozenReading] = []
        self._read_at = -AGAIN_S
        """Time of the last reading, on the clock of the event loop."""
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvgrpc-metrics", daemon=True)

    def start(self) -> None:
        self._metrics.lag.start()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the server. Requests under way end with their connections."""
        self._metrics.lag.stop()
        if self._thread.is_alive():
            await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()

    def on_loop(self, ask: Callable[[], _T]) -> _T:
        """Returns what a function returns on the event loop. Call it in another thread. Raises TimeoutError."""
        found: Future[_T] = Future()

        def run() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(ask())
            except Exception as error:  # noqa: BLE001 - raised in the thread that asked
                found.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
            return found.result(ANSWER_S)
        except RuntimeError as error:
            raise TimeoutError("the event loop has ended") from error
        finally:
            found.cancel()

    def readings(self) -> list[FrozenReading]:
        """Returns all readings of one moment, at most AGAIN_S ago. Call it on the event loop."""
        if self._loop.time() - self._read_at >= AGAIN_S:
            rows = self._metrics.read()
            self._read = [(family, [(labels, _frozen(value)) for labels, value in row]) for family, row in rows]
            self._read_at = self._loop.time()
        return self._read


def _frozen(value: float | Histogram) -> float | FrozenHistogram:
    return value.frozen() if isinstance(value, Histogram) else value


class _OnLoop(Collector):
    """The collector of a lead's metrics."""

    def __init__(self, endpoint: MetricsEndpoint) -> None:
        self._endpoint = endpoint

    def collect(self) -> Iterable[Metric]:
        for family, rows in self._endpoint.on_loop(self._endpoint.readings):
            yield _metric(family, rows)


def _metric(family: Family, rows: list[tuple[Labels, float | FrozenHistogram]]) -> Metric:
    made: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if family.kind is MetricKind.HISTOGRAM:
        made = HistogramMetricFamily(family.name, family.meaning, labels=family.labels)
    elif family.kind is MetricKind.COUNTER:
        made = CounterMetricFamily(family.name, family.meaning, labels=family.labels)
    else:
        made = GaugeMetricFamily(family.name, family.meaning, labels=family.labels)
    for labels, value in rows:
        if isinstance(value, FrozenHistogram):
            assert isinstance(made, HistogramMetricFamily)
            buckets = [(bound, count, _exemplar(example)) for bound, count, example in value.buckets]
            made.add_metric(labels, buckets, value.total)  # type: ignore[arg-type]  # None is taken: there is no example
        else:
            assert not isinstance(made, HistogramMetricFamily)
            made.add_metric(labels, value)
    return made


def _exemplar(example: Example | None) -> Exemplar | None:
    return None if example is None else Exemplar({"trace_id": example.trace_id}, example.value, example.at)


@dataclass(eq=False)
class _Scraper:
    """A connection. `since`: its beginning, on the clock of `time.monotonic`."""

    socket: socket.socket
    since: float
    answered: bool = False
    """True once its request has come."""

    def end(self) -> None:
        """Ends the connection; its thread notices."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class _ScrapeServer(ThreadingHTTPServer):
    """A thread for each connection, up to a bound. A handshake of TLS runs in its connection's thread."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listen: tuple[str, int], endpoint: MetricsEndpoint, tls: Tls | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self.endpoint, self._tls = endpoint, tls
        self._lock = threading.Lock()
        self._open: dict[Any, _Scraper] = {}
        """Connections by the socket that was accepted, oldest first."""
        self._of_thread = threading.local()
        super().__init__(listen, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for the connection, or closes the connection if there are too many."""
        with self._lock:
            full = len(self._open) >= CONNECTIONS_MAX
            silent = next((name for name, one in self._open.items() if not one.answered), None)
            if full and silent is not None:
                self._open.pop(silent).end()
            if not full or silent is not None:
                self._open[request] = _Scraper(request, time.monotonic())
        if request in self._open:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        accepted = request
        with self._lock:
            scraper = self._of_thread.scraper = self._open.get(request) or _Scraper(request, 0.0)
        try:
            request.settimeout(REQUEST_S)
            if self._tls is not None:
                context = _context(self._tls)
                with self._lock:  # so that `end` finds the new socket: its caller may draw out the handshake
                    request = scraper.socket = context.wrap_socket(
                        request, server_side=True, do_handshake_on_connect=False
                    )
                try:
                    request.do_handshake()
                except AttributeError:  # `end` has shut the connection down meanwhile
                    raise ConnectionAbortedError from None
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            with self._lock:
                if self._open.get(accepted) is scraper:
                    del self._open[accepted]

    def service_actions(self) -> None:
        """Ends connections that have not sent their request in time. The library calls it twice a second."""
        with self._lock:
            late = [one for one in self._open.values() if not one.answered and _age_s(one) > REQUEST_S]
        for one in late:
            one.end()

    def has_request(self) -> None:
        """Notes that the request of this thread's connection has come."""
        with self._lock:
            self._of_thread.scraper.answered = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the library's names
        """Logs nothing for a caller that left."""
        _log.debug("a connection to the metrics ended", exc_info=True)


def _age_s(scraper: _Scraper) -> float:
    return time.monotonic() - scraper.since


def _context(tls: Tls) -> ssl.SSLContext:
    """Returns the context of a handshake with the identity of now. OpenSSL takes keys from files only, so the key lies
    in a file without a name meanwhile.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    file = os.memfd_create("kvgrpc-tls")
    try:
        os.write(file, tls.identity.chain + b"\n" + tls.identity.key)
        made.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return made


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: _ScrapeServer
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_S
    server_version = "kvgrpc"
    sys_version = ""

    def do_GET(self) -> None:
        self.server.has_request()
        self.close_connection = True
        answers = {"/metrics": self._metrics, "/livez": self._alive, "/readyz": self._ready}
        answer = answers.get(self.path.partition("?")[0])
        if answer is None:
            self._say(HTTPStatus.NOT_FOUND, "metrics are at /metrics, health at /livez and /readyz\n")
            return
        try:
            answer()
        except TimeoutError:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"the event loop has not answered for {ANSWER_S:g} s\n")
        except OSError:
            raise  # the caller is gone
        except Exception as error:  # noqa: BLE001 - a defect of one value must not look like a lead that is down
            _log.exception("%s failed", self.path)
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"a defect of kvgrpc: {error!r}\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Logs no request."""

    def _metrics(self) -> None:
        encode, kind = choose_encoder(self.headers.get("Accept") or "")
        self._send(HTTPStatus.OK, kind, encode(self.server.endpoint.registry))

    def _alive(self) -> None:
        self.server.endpoint.on_loop(lambda: None)
        self._say(HTTPStatus.OK, "ok\n")

    def _ready(self) -> None:
        why = self.server.endpoint.on_loop(self.server.endpoint.not_ready)
        self._say(HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, f"{why or 'ok'}\n")

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(self, status: HTTPStatus, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
