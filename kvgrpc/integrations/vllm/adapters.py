"""Names of adapters for peers: digests of their files. An adapter's name and path mean other weights on another host,
and other weights here once they were pointed elsewhere; its number is an engine's own.

vLLM keeps an adapter's weights under its number, and reads its files when it likes: at the first request that needs
them, and again after others took its place. vLLM may put other weights under the number of running requests: these go
on with the new weights, and the prefix cache keeps what they compute under their old path. So once files have changed,
or a number stands for another adapter, it is open which weights computed what. Such an adapter has no name: nothing of
it is given or taken.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgrpc.errors import InvalidRequest, Reason

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Files of weights, of which vLLM reads the first that is there."""
ELSEWHERE = "load changed weights under another name, and from another folder"

Stamps = tuple[tuple[str, int, int, int, int], ...]
"""Names of files, each with the attributes that change when its bytes do."""


class Adapters:
    """The adapters of one engine, with an entry for each number and each path that there ever was."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        """Paths by number."""
        self._forms: dict[str, tuple[bool, Stamps]] = {}
        """Form and stamps of the files at each path, as first seen."""
        self._digests: dict[str, str] = {}
        self._unclear: dict[int | str, str] = {}
        """Numbers and paths that stood for unknown weights -> reason."""

    def seen(self, adapter: "LoRARequest") -> None:
        """Notes an adapter before vLLM loads it, or computes with it, for any request."""
        number, path = adapter.lora_int_id, adapter.lora_path
        if adapter.load_inplace:
            self._unclear.setdefault(number, f"was loaded in place: {ELSEWHERE}")
        if (before := self._paths.setdefault(number, path)) != path:
            for unclear in (number, before, path):
                self._unclear.setdefault(unclear, f"shares its number with another one: {ELSEWHERE}")
            self._paths[number] = path
        form = adapter.is_3d_lora_weight, _stamps(path)
        if self._forms.setdefault(path, form) != form:
            self._unclear.setdefault(path, "has changed since it was loaded: put changed weights into another folder")

    def name(self, adapter: "LoRARequest | None") -> str:
        """Returns the name, the same for the same weights on every host; empty without adapter. Reads files once.

        Raises InvalidRequest (CONTENT_REQUIRED) for an adapter that has no name.
        """
        if adapter is None:
            return ""
        path = adapter.lora_path
        self.seen(adapter)
        self._check(adapter)
        if path not in self._digests:
            self._digests[path] = _digest(adapter, [stamp[0] for stamp in self._forms[path][1]])
            self.seen(adapter)
            self._check(adapter)
        return self._digests[path]

    def _check(self, adapter: "LoRARequest") -> None:
        for what in (adapter.lora_int_id, adapter.lora_path):
            if what in self._unclear:
                raise _nameless(adapter, self._unclear[what])


def tell_of_loads(tell: Callable[["LoRARequest"], None]) -> None:
    """Makes the engine core of this process call `tell` with each adapter before it loads it.

    vLLM's connectors hear of requests only, and not of adapters that are loaded before one, or in place of another.
    """
    from vllm.v1.engine.core import EngineCore

    load = EngineCore.add_lora

    @functools.wraps(load)  # vLLM reads the arguments from the signature
    def add_lora(core: Any, lora_request: "LoRARequest") -> Any:
        tell(lora_request)
        return load(core, lora_request)

    EngineCore.add_lora = add_lora


def _stamps(path: str) -> Stamps:
    """Returns the stamps of the files at a path; empty if there are none."""
    found = []
    for name in (CONFIG, *WEIGHTS):
        try:
            of = (Path(path).expanduser() / name).stat()
        except OSError:
            continue
        found.append((name, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns))
    return tuple(found)


def _digest(adapter: "LoRARequest", names: list[str]) -> str:
    if len(names) < 2 or names[0] != CONFIG:
        what = f"has no {CONFIG} with {WEIGHTS[0]} here: give the folder that it was downloaded to"
        raise _nameless(adapter, what)
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
