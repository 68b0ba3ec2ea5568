"""Settings of the back end, from the environment: SGLang's flags have no place for them.

Their names do not begin with KVGRPC_, by which the lead has its own settings, such as KVGRPC_TLS_DIR.
"""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sglang.version import __version__

from kvgrpc.integrations.derived_keys import read_secret

DATA_PATHS = ("cma", "nixl", "collective")


@dataclass(frozen=True)
class Settings:
    """The settings of one engine."""

    listen: str
    """Address at which the lead serves."""
    serve_flags: tuple[str, ...]
    """More flags of `kvgrpc serve` for the lead, such as --advertise."""
    data_paths: tuple[str, ...]
    pairing_secret: bytes
    """The secret that both engines share; empty: none."""
    weights_revision: str
    """The name of what the KV is of, beside the tokens. SGLang's version counts: aux is as that version has it."""
    across_engines: bool
    """True if this engine exchanges KV with engines of other programs, and with SGLang's that are set so, alone."""

    @classmethod
    def read(cls, args: Any, bootstrap_port: int, environment: Mapping[str, str] = os.environ) -> Self:
        """Reads the settings of an engine with SGLang's ServerArgs. `bootstrap_port`: the port of SGLang's bootstrap
        server, for prefill; 0: any.

        Raises ValueError for a secret that cannot be used.
        """
        across = is_across(environment)
        model = f"{args.model_path}@{args.revision or ''}"
        if not across:
            model = f"sglang {__version__}: {model} {args.quantization or ''}".strip()
        return cls(
            environment.get("SGLANG_KVGRPC_LISTEN") or f"{args.host}:{bootstrap_port}",
            tuple(shlex.split(environment.get("SGLANG_KVGRPC_SERVE_FLAGS", ""))),
            tuple(filter(None, environment.get("SGLANG_KVGRPC_DATA_PATHS", "").split(","))) or DATA_PATHS,
            read_secret(environment.get("SGLANG_KVGRPC_PAIRING_SECRET_FILE", "")),
            environment.get("SGLANG_KVGRPC_WEIGHTS_REVISION") or model,
            across,
        )


def is_across(environment: Mapping[str, str]) -> bool:
    """Returns whether an engine exchanges KV with engines of other programs."""
    return environment.get("SGLANG_KVGRPC_ACROSS_ENGINES", "") not in ("", "0")
