"""A router with tracing of its own, which sends a request through two servers."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.vllm.engines import MAX_TOKENS
from tests.vllm.servers import MODEL, Server


class Router:
    """A router whose legs are client spans under one request."""

    def __init__(self, endpoint: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "router"}))
        self._provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
        self._tracer = self._provider.get_tracer("router")

    @contextmanager
    def request(self) -> Iterator[str]:
        """Begins one request, and yields the id of its trace."""
        with self._tracer.start_as_current_span("request") as span:
            yield trace.format_trace_id(span.get_span_context().trace_id)

    def leg(self, server: Server, prompt: list[int], *, stated: str = "header", **body: Any) -> Any:
        """Returns a leg's answer. `stated` puts the trace into the "header", the "params" or nowhere. Raises
        HTTPError.
        """
        headers: dict[str, str] = {}
        with self._tracer.start_as_current_span(f"leg {server.name}", kind=trace.SpanKind.CLIENT):
            inject(headers)
            if stated == "params":
                body["kv_transfer_params"] = {**body["kv_transfer_params"], "traceparent": headers["traceparent"]}
            return asked(server, prompt, headers if stated == "header" else {}, **body)

    def close(self) -> None:
        self._provider.shutdown()


def asked(server: Server, prompt: list[int], headers: dict[str, str] | None = None, **body: Any) -> Any:
    """Returns a server's answer. Raises HTTPError."""
    flags = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, **flags, **body}
    all_headers = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(whole).encode(), all_headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
