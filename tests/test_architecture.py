"""Who may import whom, and what is public.

The rules themselves are the import-linter contracts in pyproject.toml; here they are run, and it
is checked that they cannot go stale unnoticed.
"""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvgrpc

ROOT = Path(__file__).parent.parent
RULES: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]

# Runs with the base install: no numpy, torch, nixl or server parts. What is imported here must not
# need more, because routers and schedulers install no more.
BASE_INSTALL = """
import sys
from importlib.abc import MetaPathFinder

BASE = {"google", "grpc", "kvgrpc", "opentelemetry", "typing_extensions", *sys.stdlib_module_names}


class OnlyBase(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        # Importers that are not installed by pip (editable installs) have underscored names.
        if name.partition(".")[0] not in BASE and not name.startswith("_"):
            raise ImportError(f"{name} is not in the base install of kvgrpc")


sys.meta_path.insert(0, OnlyBase())
for module in sys.argv[1:]:
    __import__(module)
"""
# Prints all modules of a process with a client.
CLIENT = """
import sys

from kvgrpc.client import connect_sync

connect_sync("127.0.0.1:1").close()
print(*sys.modules)
"""
OF_THE_CLIENT = {"client", "errors", "v1"}
HEAVY = {"nixl_cu12", "numpy", "rich", "torch", "typer"}


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint, "--no-cache"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_contract_names_a_package_that_has_a_layer() -> None:
    """A misspelt package would have a contract that holds because it governs nothing."""
    contracts = RULES["contracts"]
    layers = {
        name.strip("() ")
        for contract in contracts
        for layer in contract.get("layers", [])
        for name in layer.replace("|", ":").split(":")
    }
    named = {
        name
        for contract in contracts
        for key in ("package", "home", "may_import", "but_not")
        for name in ([contract[key]] if isinstance(contract.get(key), str) else contract.get(key, []))
        if name.startswith("kvgrpc.")
    }
    # `kvgrpc.*_pb2_grpc` names files of several packages.
    assert {n for n in named if "*" not in n and n.split(".")[1] not in layers} == set()


@pytest.mark.parametrize("name", ["kvgrpc", "kvgrpc.errors", "kvgrpc.client", "kvgrpc.v1"])
def test_the_base_install_is_enough_to_import(name: str) -> None:
    command = [sys.executable, "-c", BASE_INSTALL, name]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_client_loads_nothing_of_a_server() -> None:
    loaded = subprocess.run([sys.executable, "-c", CLIENT], cwd=ROOT, check=True, capture_output=True, text=True)
    names = loaded.stdout.split()
    assert {name.split(".")[1] for name in names if name.startswith("kvgrpc.")} == OF_THE_CLIENT
    assert HEAVY.isdisjoint(names)


def test_what_is_heavy_is_in_extras_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split("[>=]", row)[0] for row in project["dependencies"]} == {"grpcio", "opentelemetry-api", "protobuf"}


def test_public_names_are_sorted_and_importable() -> None:
    assert kvgrpc.__all__ == sorted(kvgrpc.__all__)
    module = importlib.import_module("kvgrpc")
    assert [name for name in kvgrpc.__all__ if not hasattr(module, name)] == []
