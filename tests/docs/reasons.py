"""The gRPC codes of each reason, and the reasons that are sent at all, read from the code."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from kvgrpc.config import PoolConfig
from kvgrpc.core.tables import remembered
from kvgrpc.core.tables.leases import END_REASON, LeaseState
from kvgrpc.core.tensors import ended
from kvgrpc.core.values.compatibility import EngineDescription, check_compatible
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.errors import BY_CODE, Exhausted, InternalError, KVGrpcError, OutOfRange, PreconditionFailed, Reason
from kvgrpc.service.tensors import store_transfers
from tests.docs.pages import ROOT

ANSWERING = ("core", "service", "wire")
"""Packages whose errors become those of RPCs and sessions."""
SENDING = (*ANSWERING, "datapath", "engine")
"""Packages that may put a reason into an answer or a failure."""

_CLASSES = {kind.__name__: code for code, kind in BY_CODE.items()}
_LIMITS = {"full": Exhausted.code, "too_many": OutOfRange.code}
"""Codes of the functions of `kvgrpc.errors` that make errors of limits. Their reason is LIMIT_EXCEEDED, or is named."""


@cache
def codes() -> dict[str, set[str]]:
    """Returns the codes by reason, for all errors that the answering packages raise."""
    found: dict[str, set[str]] = {}
    for reason, code in {*raised(), *_ends_of_leases(), *_too_late(), *_outdated(), *_incompatible(), *_tensors()}:
        found.setdefault(reason, set()).add(code)
    return found


@cache
def sent() -> set[str]:
    """Returns the reasons that any code may send."""
    named = {node.attr for package in SENDING for tree in _trees(package) for node in _reasons(tree)}
    return (named | {Reason.LIMIT_EXCEEDED}) - {"__members__"}


def raised() -> Iterator[tuple[str, str]]:
    """Yields (reason, code) of every `SomeError(Reason.X, ...)`, and of every error of a limit."""
    for package in ANSWERING:
        for name, node in _calls(package):
            if name in _CLASSES and node.args:
                for reason in _reasons(node.args[0]):
                    yield reason.attr, _CLASSES[name]
            elif name in _LIMITS:
                named = [reason.attr for reason in _reasons(node)]
                yield named[0] if named else Reason.LIMIT_EXCEEDED, _LIMITS[name]


def _ends_of_leases() -> Iterator[tuple[str, str]]:
    """Yields the errors of ended leases, whose reasons stand in a table."""
    for state, reason in END_REASON.items():
        yield reason, (InternalError if state is LeaseState.LOST else PreconditionFailed).code


def _too_late() -> Iterator[tuple[str, str]]:
    """Yields the errors of late calls, whose reasons stand in a table."""
    for reason in remembered._SAID:
        yield reason, remembered.too_late(reason, "").code


def _outdated() -> Iterator[tuple[str, str]]:
    """Yields the error of every `outdate(access, Reason.X)`, raised for later calls about the access."""
    for tree in _trees("core"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "outdate":
                for reason in _reasons(node.args[1]):
                    yield reason.attr, PreconditionFailed.code


def _tensors() -> Iterator[tuple[str, str]]:
    """Yields the failures of transfers, raised for callers that wait for their tensor, and the errors after a tensor's
    end.
    """
    for reason, kind in store_transfers._BY_REASON.items():
        yield reason, kind.code
    for reason in ended._SAID:
        yield reason, PreconditionFailed.code


def _incompatible() -> Iterator[tuple[str, str]]:
    """Yields the errors of engines that do not fit."""
    here = EngineDescription("p", 1, "", 1, 1, "w", PoolConfig().layout(), PoolKind.SERVER_MANAGED, 1)
    for there in (
        replace(here, protocol_min=2, protocol_max=2),
        replace(here, weights_revision="v"),
        replace(here, world_size=2),
    ):
        with pytest.raises(PreconditionFailed) as raised:
            check_compatible(here, there)
        error: KVGrpcError = raised.value
        yield error.reason, error.code


def _reasons(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason":
            yield node


def _calls(package: str) -> Iterator[tuple[str, ast.Call]]:
    """Yields every call of a function or class by its name alone."""
    for tree in _trees(package):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield node.func.id, node


@cache
def _trees(package: str) -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "kvgrpc" / package).rglob("*.py"))]
