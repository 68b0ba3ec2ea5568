"""Entry of the plugin, which SGLang calls at the start of each of its processes, before it reads its arguments."""

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import add_disagg_transfer_backend_choices

NAME = "kvgrpc"
"""Name of the back end, as SGLang's flag takes it."""


def register() -> None:
    """Makes the back end known: to the flag, to the enumeration of back ends, and to the function that gives classes.

    Nothing else is imported yet: SGLang's arguments are not read, and another back end may be chosen.
    """
    add_disagg_transfer_backend_choices([NAME])
    HookRegistry.register("sglang.srt.disaggregation.utils.TransferBackend._missing_", _member, HookType.REPLACE)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _class_of, HookType.AROUND)


def _member(value: object) -> object:
    """Returns the member of SGLang's enumeration for this back end; None for another unknown value."""
    from sglang.srt.disaggregation.utils import TransferBackend

    if value != NAME:
        return None
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = NAME.upper(), NAME
    return TransferBackend._value2member_map_.setdefault(NAME, member)


def _class_of(found: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Returns the class that SGLang asks for, if it asks for one of this back end's own."""
    if transfer_backend.value != NAME or class_type.value == "kvargs":
        return found(transfer_backend, class_type)
    from kvgrpc.integrations.sglang import hooks
    from kvgrpc.integrations.sglang.manager import KVManager, NoBootstrapServer
    from kvgrpc.integrations.sglang.receiver import KVReceiver
    from kvgrpc.integrations.sglang.sender import KVSender
    from kvgrpc.integrations.sglang.settings import is_across

    if class_type.value == "manager":
        hooks.watch(across=is_across(os.environ))
    own = {"manager": KVManager, "sender": KVSender, "receiver": KVReceiver, "bootstrap_server": NoBootstrapServer}
    return own[class_type.value]
