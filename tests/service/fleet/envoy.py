"""A real Envoy before the endpoint picker, and engines' HTTP servers that remember what they got."""

import http.client
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.service.engines import wait_until

ENVOY = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
NEEDS_ENVOY = pytest.mark.skipif(ENVOY is None, reason="there is no envoy")
TYPE = "type.googleapis.com/envoy.extensions"
HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def filters(mode: str, allowed: list[str] | None) -> list[dict[str, Any]]:
    """Returns Envoy's filters: what the gateway allows, the picker, the router."""
    found: list[dict[str, Any]] = []
    if allowed is not None:
        row = {
            "metadata_namespace": "envoy.lb.subset_hint",
            "value": {"x-gateway-destination-endpoint-subset": allowed},
        }
        typed = {"@type": f"{TYPE}.filters.http.set_metadata.v3.Config", "metadata": [row]}
        found.append({"name": "envoy.filters.http.set_metadata", "typed_config": typed})
    whole = mode == "FULL_DUPLEX_STREAMED"
    skip = "SKIP" if mode == "NONE" else "SEND"
    config: dict[str, Any] = {
        "@type": f"{TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "message_timeout": "10s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": skip,
            "request_body_mode": mode,
            "response_body_mode": mode,
            "request_trailer_mode": "SEND" if whole else "SKIP",
            "response_trailer_mode": "SEND" if whole else "SKIP",
        },
        "metadata_options": {"forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]}},
    }
    found.append({"name": "envoy.filters.http.ext_proc", "typed_config": config})
    router = {"@type": f"{TYPE}.filters.http.router.v3.Router"}
    return [*found, {"name": "envoy.filters.http.router", "typed_config": router}]


def configuration(folder: Path, picker: str, mode: str, allowed: list[str] | None) -> dict[str, Any]:
    host, port = picker.split(":")
    manager = {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "access_log": [
            {
                "name": "envoy.access_loggers.file",
                "typed_config": {
                    "@type": f"{TYPE}.access_loggers.file.v3.FileAccessLog",
                    "path": str(folder / "access.log"),
                    "log_format": {"text_format_source": {"inline_string": "%RESPONSE_CODE_DETAILS%\n"}},
                },
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "60s"}}],
                }
            ]
        },
        "http_filters": filters(mode, allowed),
    }
    address = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    chains = [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}]
    endpoint = {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
    return {
        "admin": {"address": address},
        "static_resources": {
            "listeners": [{"name": "http", "address": address, "filter_chains": chains}],
            "clusters": [
                {
                    "name": "engines",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "original_dst_lb_config": {
                        "use_http_header": True,
                        "http_header_name": "x-gateway-destination-endpoint",
                    },
                },
                {
                    "name": "picker",
                    "type": "STATIC",
                    "typed_extension_protocol_options": HTTP2,
                    "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint]}]},
                },
            ],
        },
    }


@contextmanager
def gateway(folder: Path, picker: str, mode: str = "NONE", allowed: list[str] | None = None) -> Iterator[str]:
    """Runs Envoy before the picker. Yields its HTTP address."""
    assert ENVOY is not None
    folder.mkdir()
    config, admin = folder / "envoy.json", folder / "admin"
    config.write_text(json.dumps(configuration(folder, picker, mode, allowed)))
    command = [ENVOY, "-c", str(config), "--admin-address-path", str(admin), "--concurrency", "1"]
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--disable-hot-restart", "--log-level", "warning"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        listening = [""]

        def up() -> bool:
            if process.poll() is not None:
                raise AssertionError((folder / "envoy.log").read_text())
            if not admin.exists() or not admin.read_text():
                return False
            try:
                status, text = ask(admin.read_text(), "GET", "/listeners?format=json")
            except OSError:
                return False
            rows = json.loads(text).get("listener_statuses", []) if status == 200 else []
            for row in rows:
                place = row["local_address"]["socket_address"]
                listening[0] = f"{place['address']}:{place['port_value']}"
            return bool(rows)

        wait_until(up)
        yield listening[0]
    finally:
        process.terminate()
        process.wait(30)


def ask(address: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
    """Makes one HTTP request. Returns the status and the text of its answer."""
    host, port = address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


class HttpServer:
    """The HTTP server of an engine: it answers with the engine's id while `gate` is open, and keeps each request's
    headers and body.
    """

    def __init__(self, engine_id: str, host: str) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        requests, gate, answer = self.requests, self.gate, engine_id.encode()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = b"".join(self._parts())
                requests.append(({name.lower(): text for name, text in self.headers.items()}, body))
                gate.wait()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def _parts(self) -> Iterator[bytes]:
                """Yields the body, whose size is stated, or that comes in chunks."""
                if "content-length" in self.headers:
                    yield self.rfile.read(int(self.headers["content-length"]))
                    return
                while size := int(self.rfile.readline(), 16):
                    yield self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
                """Logs nothing."""

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
