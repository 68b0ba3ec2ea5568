"""Starts each router before two servers, and finds its program."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.routers.cases import COMPLETE, COMPLETIONS, Case, words
from bench.routers.client import OK, ask
from tests.vllm.engines import free_port, wait_until
from tests.vllm.routers import GO, discovering_router, go_router
from tests.vllm.servers import MODEL, Server, example_router, running, usual_router

PROXIES = "examples/disaggregated/disaggregated_serving"
TOY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
EDGE_CASES = "tests/v1/kv_connector/nixl_integration/test_edge_cases.py"
"""vLLM's own test of its NIXL connector, through the toy proxy."""
XPYD = "examples/online_serving/disaggregated_serving_p2p_nccl_xpyd/disagg_proxy_p2p_nccl_xpyd.py"
# The proxy's own main listens at fixed ports, on all addresses.
XPYD_MAIN = """
import importlib.util, sys
path, discovery_port, port = sys.argv[1:]
spec = importlib.util.spec_from_file_location("proxy", path)
proxy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(proxy)
proxy.start_service_discovery("127.0.0.1", int(discovery_port))
proxy.app.run("127.0.0.1", int(port))
"""


class Missing(Exception):
    """Raised when a router is not available: its program is not here, or it did not start. The message says why."""


@dataclass(frozen=True)
class Programs:
    """Paths and commands of routers that no package has as a program."""

    vllm: Path
    """vLLM's source distribution, unpacked."""
    old_vllm: Path
    """Source distribution of a vLLM version that had the XpYd proxy."""
    python: Path
    """Interpreter with the packages that the XpYd proxy imports."""
    llm_d: Sequence[str]
    production_stack: Sequence[str]

    def script(self, name: str, *, old: bool = False) -> str:
        """Returns the path of a file in a source distribution of vLLM. Raises Missing if there is none."""
        path = (self.old_vllm if old else self.vllm) / name
        if not path.exists():
            raise Missing(f"vLLM's source distribution could not be had: there is no {path}")
        return str(path)


@dataclass(frozen=True)
class RouterSite:
    """Two servers, and the port at which they register."""

    p: Server
    d: Server
    discovery_port: int
    folder: Path


@dataclass(frozen=True)
class Front:
    """A running router."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every request."""


@contextmanager
def start(name: str, site: RouterSite, programs: Programs) -> Iterator[Front]:
    """Runs a router that answers requests. Raises Missing on entry, and only then."""
    with ExitStack() as stack:
        try:
            front = stack.enter_context(_STARTS[name](site, programs))
        except AssertionError as why:  # the wait for the router timed out
            raise Missing(str(why)) from why
        yield front


@contextmanager
def _vllm_router(site: RouterSite, _: Programs) -> Iterator[Front]:
    with usual_router(site.p, site.d, site.folder / "vllm-router.log") as url:
        yield Front(url)


@contextmanager
def _discovering(site: RouterSite, _: Programs) -> Iterator[Front]:
    with discovering_router(site.discovery_port, site.folder / "discovering-router.log") as url:
        yield _answering(Front(url))


@contextmanager
def _toy(site: RouterSite, programs: Programs) -> Iterator[Front]:
    with _running([sys.executable, programs.script(TOY), *_hosts(site)], site, "toy") as front:
        yield front


@contextmanager
def _multi_turn(site: RouterSite, programs: Programs) -> Iterator[Front]:
    script = programs.script(f"{PROXIES}/disagg_proxy_multiturn.py")
    with _running([sys.executable, script, *_hosts(site)], site, "multi-turn") as front:
        yield front


def _hosts(site: RouterSite) -> list[str]:
    of_p = ["--prefiller-host", "127.0.0.1", "--prefiller-port", str(site.p.port)]
    of_d = ["--decoder-host", "127.0.0.1", "--decoder-port", str(site.d.port)]
    return ["--host", "127.0.0.1", *of_p, *of_d]


@contextmanager
def _push(site: RouterSite, programs: Programs) -> Iterator[Front]:
    host, _, port = site.p.lead.rpartition(":")
    command = [
        sys.executable, programs.script(f"{PROXIES}/disagg_proxy_pushconnector_demo.py"), "--model", MODEL,
        "--prefill", f"127.0.0.1:{site.p.port}", "--decode", f"127.0.0.1:{site.d.port}",
        "--prefill-engine-id", site.p.name, "--prefill-kv-host", host, "--prefill-side-channel-port", port,
    ]  # fmt: skip
    with _running(command, site, "push") as front:
        yield front


@contextmanager
def _xpyd(site: RouterSite, programs: Programs) -> Iterator[Front]:
    script, port = programs.script(XPYD, old=True), free_port()
    command = [str(programs.python), "-c", XPYD_MAIN, script, str(site.discovery_port), str(port)]
    with running(command, site.folder / "router-xpyd.log"):
        yield _answering(Front(f"http://127.0.0.1:{port}"))


@contextmanager
def _production_stack(site: RouterSite, programs: Programs) -> Iterator[Front]:
    if not programs.production_stack:
        raise Missing("it is in no package registry, and --production-stack names no program")
    command = [
        *programs.production_stack, "--host", "127.0.0.1", "--service-discovery", "static",
        "--static-backends", f"{site.p.url},{site.d.url}", "--static-models", f"{MODEL},{MODEL}",
        "--static-model-labels", "prefill,decode", "--prefill-model-labels", "prefill",
        "--decode-model-labels", "decode", "--routing-logic", "disaggregated_prefill_orchestrated",
    ]  # fmt: skip
    with _running(command, site, "production-stack") as front:
        yield front


@contextmanager
def _llm_d(site: RouterSite, programs: Programs) -> Iterator[Front]:
    """Runs the sidecar before decode. Clients, or a gateway before it, name prefill."""
    if not programs.llm_d:
        raise Missing("the Go module proxy does not serve it here, and --llm-d names no program")
    port = free_port()
    flags = [f"-port={port}", f"-vllm-port={site.d.port}", "-connector=nixlv2", "-secure-proxy=false"]
    command = [*programs.llm_d, *flags]
    with running(command, site.folder / "router-llm-d.log"):
        yield _answering(Front(f"http://127.0.0.1:{port}", {"x-prefiller-host-port": f"127.0.0.1:{site.p.port}"}))


def _ours(mode: str) -> "Start":
    @contextmanager
    def begin(site: RouterSite, _: Programs) -> Iterator[Front]:
        with example_router(site.p, site.d, site.folder / f"router-ours-{mode}.log", mode) as url:
            yield Front(url)

    return begin


def _go(mode: str) -> "Start":
    @contextmanager
    def begin(site: RouterSite, _: Programs) -> Iterator[Front]:
        if GO is None:
            raise Missing("go is not on the PATH")
        with go_router(site.p, site.d, site.folder, mode) as url:
            yield Front(url)

    return begin


@contextmanager
def _running(command: Sequence[str], site: RouterSite, name: str) -> Iterator[Front]:
    """Runs a router that takes `--port`."""
    port = free_port()
    with running([*command, "--port", str(port)], site.folder / f"router-{name}.log"):
        yield _answering(Front(f"http://127.0.0.1:{port}"))


def _answering(front: Front) -> Front:
    """Waits until it answers. Not all routers have another way to tell that they know both engines."""
    case = Case(COMPLETIONS, COMPLETE, (words([5, 6, 7]),), (("max_tokens", 1),))
    wait_until(lambda: ask(front.url, case, front.headers).status == OK)
    return front


Start = Callable[[RouterSite, Programs], AbstractContextManager[Front]]
_STARTS: dict[str, Start] = {
    "vllm-router": _vllm_router,
    "vllm-router, engines register": _discovering,
    "vLLM's toy proxy": _toy,
    "vLLM's multi-turn proxy": _multi_turn,
    "vLLM's push proxy": _push,
    "vLLM's XpYd proxy": _xpyd,
    "production-stack": _production_stack,
    "llm-d's routing sidecar": _llm_d,
    "examples/router, pull": _ours("pull"),
    "examples/router, push": _ours("push"),
    "examples/router-go, pull": _go("pull"),
    "examples/router-go, push": _go("push"),
}


def command_of(text: str) -> list[str]:
    """Returns the words of a command, split like a shell does."""
    return shlex.split(text)
