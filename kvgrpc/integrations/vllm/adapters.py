"""What an adapter is called to peers: a digest of its files. Its name and its path mean other weights on another host,
and other weights here once somebody has pointed them elsewhere; its number is an engine's own.

vLLM reads an adapter's files when it likes: at the first request that needs it, and again when others took its place.
So files that changed while an adapter is in use leave open which weights computed what, and so does an adapter that is
loaded in place, over another one. Such an adapter has no name: nothing of it is given or taken.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from kvgrpc.errors import InvalidRequest, Reason

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM reads the first that is there."""

Stamps = tuple[tuple[str, int, int, int, int], ...]
"""Of each file: its name, and what changes when its bytes do."""


class Adapters:
    """Of one engine: one entry for each that was ever asked for."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, bool], tuple[Stamps, str]] = {}

    def name(self, adapter: "LoRARequest | None") -> str:
        """The same for the same weights, on every host; empty without an adapter. The first time the files are read.

        Raises InvalidRequest (CONTENT_REQUIRED) for one that has none.
        """
        if adapter is None:
            return ""
        if adapter.load_inplace:
            raise _nameless(adapter, "is loaded in place: load changed weights under another name")
        key = adapter.lora_int_id, adapter.lora_path, adapter.is_3d_lora_weight
        stamps = _stamps(adapter)
        if key not in self._known:
            self._known[key] = stamps, _digest(adapter, [stamp[0] for stamp in stamps])
        seen, digest = self._known[key]
        if _stamps(adapter) != seen:
            raise _nameless(adapter, "has changed since it was loaded: put changed weights into another folder")
        return digest


def _stamps(adapter: "LoRARequest") -> Stamps:
    folder = Path(adapter.lora_path).expanduser()
    found = []
    for name in (CONFIG, *WEIGHTS):
        try:
            of = (folder / name).stat()
        except OSError:
            continue
        found.append((name, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns))
    if len(found) < 2:
        raise _nameless(adapter, f"has no {CONFIG} with {WEIGHTS[0]} here: give the folder that it was downloaded to")
    return tuple(found)


def _digest(adapter: "LoRARequest", names: list[str]) -> str:
    made = hashlib.sha256(b"3d" if adapter.is_3d_lora_weight else b"2d")
    for name in names[:2]:
        try:
            with (Path(adapter.lora_path).expanduser() / name).open("rb") as file:
                of = hashlib.file_digest(file, "sha256")
        except OSError as error:
            raise _nameless(adapter, f"cannot be read: {error}") from error
        made.update(name.encode() + b"\0" + of.digest())
    return made.hexdigest()


def _nameless(adapter: "LoRARequest", why: str) -> InvalidRequest:
    return InvalidRequest(Reason.CONTENT_REQUIRED, f"adapter {adapter.lora_name!r} at {adapter.lora_path} {why}")
