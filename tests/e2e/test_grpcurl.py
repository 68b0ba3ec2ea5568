"""The commands of docs/grpcurl.md, run in order, print what the page shows."""

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.service.rpc.server import REFLECTION_V1, REFLECTION_V1ALPHA, SERVICES
from tests.service.engines import Engine, ServeProcess
from tests.service.tensors.stores import TENSORS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "grpcurl.md"
TOOLS = ROOT / ".tools" / "bin"
_FENCED = re.compile(r"^```(sh servers|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVE = re.compile(r"^kvgrpc serve --port (\d+) (.*)$", re.MULTILINE)
MARK = "----- end of block"
OTHERS = ("grpc.channelz.v1.Channelz", "grpc.health.v1.Health", REFLECTION_V1, REFLECTION_V1ALPHA)
"""Services of every server that are not kvgrpc's."""


def blocks() -> list[tuple[str, str]]:
    """Returns (kind, text) of every fenced block of the page."""
    return [(found[1], found[2]) for found in _FENCED.finditer(PAGE.read_text())]


@pytest.fixture
def grpcurl() -> str:
    """Returns the folder of the program. Skips the test if it is not installed."""
    found = shutil.which("grpcurl", path=os.pathsep.join([str(TOOLS), os.environ["PATH"]]))
    if found is None:
        pytest.skip("there is no grpcurl on the PATH or in .tools/bin: make grpcurl builds it where Go is installed")
    return str(Path(found).parent)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[dict[str, Engine]]:
    """Yields the servers of the page, which listen on free ports, by the port that the page gives them."""
    (servers,) = (text for kind, text in blocks() if kind == "sh servers")
    processes = {
        port: ServeProcess(tmp_path / port, "--listen", "127.0.0.1:0", *flags.split(), "--drain-s", "0")
        for port, flags in _SERVE.findall(servers)
    }
    engines = {port: Engine(process) for port, process in processes.items()}
    yield engines
    for engine in engines.values():
        engine.close()


def script(engines: dict[str, Engine]) -> str:
    """Returns all commands, with a mark after every block."""
    lines = ["set -o pipefail"]
    for kind, text in blocks():
        if kind == "sh":
            lines += [text, f"echo; echo '{MARK}'"]
    whole = "\n".join(lines)
    for port, engine in engines.items():
        whole = whole.replace(f"127.0.0.1:{port}", engine.address)
    return whole


def expected() -> list[list[str]]:
    """Returns the lines that the page shows for each block of commands, in order."""
    found: list[list[str]] = []
    for kind, text in blocks():
        if kind == "sh":
            found.append([])
        elif kind == "text":
            found[-1] += [line.strip() for line in text.splitlines() if line.strip()]
    return found


def is_shown(line: str, printed: list[str]) -> int | None:
    """Returns the index of the printed line that matches a line of the page, or None."""
    pattern = re.compile(".*".join(re.escape(part) for part in line.split("…")))
    return next((i for i, other in enumerate(printed) if pattern.fullmatch(other.strip())), None)


def test_the_commands_of_the_page_print_what_it_shows(grpcurl: str, engines: dict[str, Engine], tmp_path: Path) -> None:
    environment = os.environ | {"PATH": os.pathsep.join([grpcurl, os.environ["PATH"]])}
    run = subprocess.run(
        ["bash", "-c", script(engines)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
        check=False,
    )
    printed = run.stdout.split(MARK)[:-1]
    assert len(printed) == len(expected()), run.stdout
    for lines, output in zip(expected(), printed, strict=True):
        left = output.splitlines()
        for line in lines:
            at = is_shown(line, left)
            assert at is not None, f"the page shows {line!r}, and there was:\n{output}"
            left = left[at + 1 :]
        assert "ERROR" not in output or any("Code:" in line for line in lines), output


def test_the_page_lists_every_service_and_no_other() -> None:
    (listed,) = (shown for shown in expected() if "grpc.health.v1.Health" in shown)
    assert sorted(listed) == sorted([*SERVICES, *OTHERS])


def test_tensors_are_put_and_listed_by_grpcurl(grpcurl: str, tmp_path: Path) -> None:
    store = Engine(ServeProcess(tmp_path, "--listen", "127.0.0.1:0", "--drain-s", "0", settings=TENSORS))

    def call(rpc: str, body: dict[str, Any]) -> dict[str, Any]:
        command = [str(Path(grpcurl) / "grpcurl"), "-plaintext", "-d", json.dumps(body), store.address]
        ran = subprocess.run([*command, f"kvgrpc.v1.{rpc}"], capture_output=True, text=True, timeout=30, check=True)
        answer: dict[str, Any] = json.loads(ran.stdout)
        return answer

    try:
        taken = call("PoolService/AllocateBlocks", {"group_block_counts": [{"block_count": 2}]})
        name = {"transfer_key": base64.b64encode(b"0123456789abcdef").decode(), "name": "layers.0.k"}
        what = {"dtype": "float16", "shape_sizes": [2, 2048], "nbytes": 8192}
        put = {"tensor": name, "description": what, "allocation_id": taken["blocks"]["allocation_id"]}
        call("TensorService/PutTensor", put)
        (row,) = call("TensorService/ListTensors", {})["tensors"]
        assert (row["name"], row["state"], row["page_count"]) == ("layers.0.k", "TENSOR_STATE_OFFERED", 2)
        assert call("TensorService/GetStagingStatus", {})["offered_count"] == 1
        assert call("TensorService/ReleaseTensors", {"transfer_key": name["transfer_key"]})["released_count"] == 1
    finally:
        store.close()
