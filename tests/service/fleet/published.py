"""What an etcd has of leads, leads that publish themselves there, and `kvgrpc fleet` that reads it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.registry.etcds import RunningEtcd
from tests.service.engines import Engine, wait_until

PREFIX = "/kvgrpc/v1/engines/"


def flags(engine_id: str, *more: str) -> tuple[str, ...]:
    return ("--engine-id", engine_id, *more)


def environment(etcd: RunningEtcd) -> dict[str, str]:
    return {"KVGRPC_FLEET_REGISTRY": f"etcd://{etcd.address}", "KVGRPC_FLEET_ENTRY_TTL_S": "3"}


def entries(etcd: RunningEtcd) -> dict[str, dict[str, Any]]:
    """Returns the entries that etcd has, by key."""
    try:
        lines = etcd.ctl("get", "--prefix", PREFIX).splitlines()
    except subprocess.SubprocessError:
        return {}
    return {key: json.loads(value) for key, value in zip(lines[::2], lines[1::2], strict=True)}


def key_of(engine: Engine) -> str:
    return f"{PREFIX}{engine.engine_id}/{engine.incarnation()}"


@contextmanager
def fleet(
    folder: Path, *more: str, within: Sequence[str] = (), home: str = "127.0.0.1", **environment: str
) -> Iterator[dict[str, str]]:
    """Runs the command, and gives its addresses and its `pid`. `within` starts it elsewhere, where it has the address
    `home`.
    """
    ready = folder / "fleet.json"
    command = [*within, sys.executable, "-m", "kvgrpc", "fleet", "--listen", f"{home}:0", "--ready-file", str(ready)]
    folder.mkdir(exist_ok=True)
    own = os.environ | environment
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True, env=own) as process:
        try:
            wait_until(lambda: ready.exists() or process.poll() is not None)
            found: dict[str, str] = json.loads(ready.read_text())
            yield found | {"pid": str(process.pid)}
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert not ready.exists()
