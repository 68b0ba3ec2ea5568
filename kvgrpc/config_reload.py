"""The settings that change while a server runs: their values are read at each use, and never kept."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

from kvgrpc.config import Config

RELOADED = ("dial_allow", "drain_s", "log_level", "log_format")
"""Settings that change while the server runs. The files of `tls`, `identity` and `tokens` are watched anyway."""
RELOADED_LIMITS = ("wait_s", "request_ttl_s")
"""Limits that change while the server runs. The state of the core has the others."""


def reloaded(held: Config, read: Config) -> Config:
    """Returns what holds after a reload: the reloaded values of `read`, and all others of `held`."""
    limits = replace(held.limits, **{name: getattr(read.limits, name) for name in RELOADED_LIMITS})
    return replace(held, limits=limits, **{name: getattr(read, name) for name in RELOADED})


def changed(held: Config, read: Config) -> Iterator[str]:
    """Yields the names of settings that differ, keys of tables as `limits.wait_s`."""
    for item in fields(Config):
        mine, other = getattr(held, item.name), getattr(read, item.name)
        if is_dataclass(mine) and type(mine) is type(other):
            for key in fields(mine):
                if getattr(mine, key.name) != getattr(other, key.name):
                    yield f"{item.name}.{key.name}"
        elif mine != other:
            yield item.name
