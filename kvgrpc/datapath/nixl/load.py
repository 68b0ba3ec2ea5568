"""Loads NIXL and its libraries into this process. No other file imports NIXL.

Before that it sets two variables of the environment, unless they are set: UCX_RCACHE_MAX_UNRELEASED=1024 bounds what
UCX keeps of memory that is gone. UCX_TCP_CONN_NB=y keeps a peer's address that does not answer from stopping the
calling thread (3 s seen, minutes behind a firewall). All else that UCX reads from its environment holds: UCX_TLS=tcp
forces TCP, UCX_NET_DEVICES=eth1 picks the network. UCX listens for peers on each network that it may use, and does not
ask who connects.
"""

import contextlib
import ctypes
import importlib
import logging
import logging.config
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvgrpc.datapath.base import DataPathUnavailable

BACKEND = "UCX"
"""Name of the back end of NIXL that moves KV."""
_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
_ENVIRONMENT = {"UCX_RCACHE_MAX_UNRELEASED": "1024", "UCX_TCP_CONN_NB": "y"}
_LIBNL = "libnl-route-3.so.200"


def nixl() -> Any:
    """Returns NIXL's Python API. Must be called before each agent is made. Raises DataPathUnavailable."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    reasons = []
    for package in _PACKAGES:
        try:
            with _logging_untouched():
                api = importlib.import_module(f"{package}._api")
        except ImportError as error:
            if not isinstance(error, ModuleNotFoundError) or error.name != package:
                reasons.append(f"{package}: {error}")
        else:
            _load_each_libnl_alone(Path(api.__file__ or "").parent)
            return api
    if reasons:
        raise DataPathUnavailable(f"NIXL is installed but does not load: {'; '.join(reasons)}")
    raise DataPathUnavailable("NIXL is not installed: install kvgrpc's extra 'nixl'; shm and cma work without it")


def backends() -> list[str]:
    """Returns the names of the back ends that NIXL finds here. It starts none. Raises DataPathUnavailable."""
    api = nixl()
    try:
        agent = api.nixl_agent("kvgrpc", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        return sorted(agent.get_plugin_list())
    except Exception as error:  # noqa: BLE001 - NIXL's errors have no other base
        raise DataPathUnavailable(f"NIXL cannot start: {error}") from None


def _load_each_libnl_alone(package: Path) -> None:
    """Loads each library called libnl-route-3 before UCX loads what needs both, so that each finds its own functions.

    NIXL brings libnl and libibverbs. NIXL's UCX also loads a module for EFA adapters, which needs the host's libefa;
    that comes with the host's libnl if rdma-core is installed. Loaded there, the host's libnl would find the functions
    of NIXL's first and enter its own tables there, and the process would end with SIGSEGV when the libraries take their
    tables apart. The host's libefa is left to UCX: it has to find NIXL's libibverbs, for which it is the driver.
    """
    with contextlib.suppress(OSError):  # a host without it has no libnl but NIXL's
        ctypes.CDLL(_LIBNL)
    for library in package.with_name(f"{package.name}.libs").glob("libnl-route-3-*.so*"):
        # This comes ahead of libraries that the program has made visible to all, as an MPI does.
        ctypes.CDLL(str(library), mode=os.RTLD_LOCAL | os.RTLD_DEEPBIND)


@contextlib.contextmanager
def _logging_untouched() -> Iterator[None]:
    """Keeps the import of NIXL from configuring logging for the process. The import would close every handler (a file
    opened with "w" stays silent from then on), print to stdout, and hide errors in handlers.
    """
    configure, raises = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda _: None  # type: ignore[assignment]
    try:
        yield
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raises
