"""What an etcd has of leads, and leads that publish themselves there."""

import json
import subprocess
from typing import Any

from tests.registry.etcds import RunningEtcd
from tests.service.engines import Engine

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
