"""Findings of `kvgrpc doctor` on this machine: one function a subject. None of them changes anything."""

import ctypes
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from importlib import metadata
from pathlib import Path

from kvgrpc import open_files
from kvgrpc.config import Config, split_address
from kvgrpc.errors import KVGrpcError

SOON = timedelta(days=7)
"""Time before the end of a certificate in which it counts as about to end."""
FEW_FILES = 4_096
"""Number of open files below which many connections do not fit."""
_PACKAGES = {"grpcio": "server", "protobuf": "server", "numpy": "server", "torch": "torch", "nixl-cu12": "nixl"}
"""Packages by name, each with the extra that brings it. Only those of `server` are needed."""
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_RDMA = Path("/sys/class/infiniband")
_UNSYNCHRONISED = 0x40
"""Flag STA_UNSYNC of adjtimex: nothing keeps the clock right."""


class Grade(Enum):
    """Grade of a finding."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One finding: its subject, what was found, and what to do if it is not good."""

    grade: Grade
    subject: str
    says: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.grade is Grade.OK


def of_this_machine(config: Config, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the findings, subject by subject."""
    yield from packages()
    yield from nixl(environment)
    yield from memory(config)
    yield from processes()
    yield from descriptors(config)
    yield from ports(config)
    yield from tls(config)
    yield from clock()


def packages() -> Iterator[Finding]:
    """Says which packages are here."""
    for name, extra in _PACKAGES.items():
        try:
            yield Finding(Grade.OK, "packages", f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            grade = Grade.ERROR if extra == "server" else Grade.NOTE
            yield Finding(grade, "packages", f"{name} is not installed", f"install kvgrpc with its extra '{extra}'")


def nixl(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Says whether NIXL loads, which back end of it would be used, and what its transports find."""
    from kvgrpc.datapath.base import DataPathUnavailable
    from kvgrpc.datapath.nixl.load import BACKEND, backends

    try:
        found = backends()
    except DataPathUnavailable as error:
        yield Finding(Grade.WARNING, "nixl", str(error), "shm, cma and collective work without it")
        return
    if BACKEND in found:
        yield Finding(Grade.OK, "nixl", f"NIXL finds {', '.join(found)}, of which {BACKEND} is used")
    else:
        yield Finding(
            Grade.WARNING, "nixl", f"NIXL finds {', '.join(found) or 'no back end'}, and {BACKEND} would be used",
            "install kvgrpc's extra 'nixl' again; NIXL_PLUGIN_DIR names a folder with other back ends",
        )  # fmt: skip
    devices = sorted(path.name for path in _RDMA.iterdir()) if _RDMA.is_dir() else []
    if devices:
        yield Finding(Grade.OK, "nixl", f"RDMA devices: {', '.join(devices)}")
    else:
        yield Finding(
            Grade.NOTE, "nixl", "no RDMA device: nixl goes over shared memory on this host, and over TCP to others",
            "in a container the device needs its plug-in, and memlock without a limit",
        )  # fmt: skip
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        if value := environment.get(name):
            yield Finding(Grade.NOTE, "nixl", f"{name}={value} limits what UCX may use", f"unset {name}, unless meant")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if devices and locked != resource.RLIM_INFINITY:
        yield Finding(
            Grade.WARNING, "nixl", f"at most {locked} bytes may be locked, and RDMA locks the whole pool",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)",
        )  # fmt: skip


def memory(config: Config) -> Iterator[Finding]:
    """Says whether the pool fits."""
    from kvgrpc.datapath.host.host_memory import available

    try:
        os.close(os.memfd_create("kvgrpc-doctor"))
    except OSError as error:
        yield Finding(Grade.ERROR, "memory", f"no shared memory can be made: {error.strerror}", "allow memfd_create")
        return
    layout, left = config.layout(), available()
    wanted = layout.total_bytes if layout is not None else 0
    if left is None:
        said = f"what is left of the memory is unknown here; the pool has {wanted:,} bytes"
        yield Finding(Grade.NOTE, "memory", said, "compare that with the memory of this host or container")
    elif wanted > left.nbytes:
        said = f"the pool has {wanted:,} bytes, and {left.nbytes:,} are left ({left.limited_by})"
        yield Finding(Grade.ERROR, "memory", said, "make the pool smaller: pool.blocks")
    else:
        yield Finding(
            Grade.OK, "memory", f"{left.nbytes:,} bytes are left ({left.limited_by}); the pool has {wanted:,}"
        )


def processes() -> Iterator[Finding]:
    """Says whether processes of this user may read each other's memory, for cma."""
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
    if scope in {"0", "1"}:
        yield Finding(Grade.OK, "cma", "processes of this user may read each other's memory")
        return
    yield Finding(
        Grade.WARNING, "cma", f"the kernel lets no process read another one's memory (ptrace_scope {scope})",
        "sysctl kernel.yama.ptrace_scope=1, or leave cma out of data_paths",
    )  # fmt: skip


def descriptors(config: Config) -> Iterator[Finding]:
    """Says how many files this process may open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = "without a limit" if most == resource.RLIM_INFINITY else f"up to {most:,}"
    if most != resource.RLIM_INFINITY and most < min(FEW_FILES, 2 * config.limits.connections):
        remedy = "ulimit -n 65536 (systemd: LimitNOFILE=65536)"
        yield Finding(
            Grade.WARNING, "files", f"open files {said}: {open_files.unreserved() // 2} connections fit", remedy
        )
    else:
        yield Finding(Grade.OK, "files", f"open files {said}")


def ports(config: Config) -> Iterator[Finding]:
    """Says whether the addresses of the configuration are free."""
    for name in ("listen", "admin_listen", "metrics"):
        if not (address := getattr(config, name)):
            continue
        host, port = split_address(address, name)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((host, port))
            except OSError as error:
                said = f"{name} {address}: {error.strerror or error}"
                yield Finding(Grade.WARNING, "ports", said, "a server may run there already; otherwise choose another")
            else:
                yield Finding(Grade.OK, "ports", f"{name} {address} is free")


def tls(config: Config) -> Iterator[Finding]:
    """Says whether the TLS files are usable, how long, and who they make this server."""
    from kvgrpc.tls import TlsFiles, read

    files = config.tls.files()
    if files is None:
        if not config.tls.workload_api:
            yield Finding(Grade.NOTE, "tls", "no TLS is set", "set tls.dir before the server listens off loopback")
        return
    try:
        own = read(TlsFiles(*files))
    except KVGrpcError as error:
        yield Finding(Grade.ERROR, "tls", error.sentence, "put a certificate, its key and the CAs there")
        return
    now = datetime.now(UTC)
    until = f"{own.not_before:%Y-%m-%d %H:%M} to {own.not_after:%Y-%m-%d %H:%M} UTC"
    if not own.not_before <= now <= own.not_after:
        yield Finding(
            Grade.ERROR, "tls", f"the certificate is valid from {until}, not now", "renew it; look at the clock"
        )
    elif own.not_after - now < SOON:
        yield Finding(Grade.WARNING, "tls", f"the certificate ends on {own.not_after:%Y-%m-%d}", "renew it")
    else:
        yield Finding(Grade.OK, "tls", f"the certificate is valid from {until}")
    if all("://" in name for name in own.names):
        yield Finding(
            Grade.ERROR, "tls", f"the certificate names {', '.join(own.names) or 'nobody'}, and no host",
            "add the DNS name or the address under which peers dial: gRPC compares it",
        )  # fmt: skip
    else:
        yield Finding(Grade.OK, "tls", f"this server is {', '.join(own.names)}")


def clock() -> Iterator[Finding]:
    """Says whether something keeps the clock right: certificates and tokens are compared with it."""
    status, remedy = _clock_status(), "run an NTP client: certificates and tokens have a time"
    if status is None:
        yield Finding(Grade.NOTE, "clock", "the kernel does not say whether the clock is right", remedy)
    elif status & _UNSYNCHRONISED:
        yield Finding(Grade.NOTE, "clock", "nothing keeps this clock right, as far as the kernel knows", remedy)
    else:
        yield Finding(Grade.OK, "clock", "the clock is synchronised")


def _clock_status() -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    state = (ctypes.c_byte * 512)()  # struct timex, all zero: only read
    if libc.adjtimex(ctypes.byref(state)) < 0:
        return None
    # struct timex: modes (unsigned), padding, then offset, freq, maxerror, esterror (long), status (int).
    return ctypes.c_int.from_buffer(state, 8 + 4 * ctypes.sizeof(ctypes.c_long)).value
