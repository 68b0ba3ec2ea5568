"""Compiles kvgrpc/datapath/copy/rows.c while the package is built or installed, where there is a C compiler.

Without one the package is the same but for slower copies of short runs. CC names the compiler.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("kvgrpc/datapath/copy/rows.c")
LIBRARY = SOURCE.with_name("_rows.so")


def compile_rows(root: Path) -> str:
    """Why there is no library; empty when there is one."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-O2", "-fPIC", "-shared", "-o", str(root / LIBRARY), str(root / SOURCE)]
    (root / LIBRARY).unlink(missing_ok=True)
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        return f"{compiler[0]}: {error.strerror}"
    return "" if done.returncode == 0 else done.stderr


class RowsHook(BuildHookInterface[Any]):
    """Of wheels and editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - the hook's signature
        if self.target_name != "wheel" or sys.platform != "linux":
            return
        if why := compile_rows(Path(self.root)):
            self.app.display_warning(f"copies in Python: rows.c was not compiled: {why}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(LIBRARY.as_posix())
