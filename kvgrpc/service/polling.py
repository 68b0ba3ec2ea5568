"""How gRPC waits for its sockets in a process that is a server and nothing else.

gRPC reads this when it is imported: nothing here imports it. A process that embeds a server is its owner's, who may
call this first, or set the variable.
"""

from collections.abc import MutableMapping

VARIABLE = "GRPC_EXPERIMENTS"
IN_PLACE = "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"
"""gRPC then reads a socket in the thread that waits for its news, and not in one of a pool that wakes that thread up.
These are names of one version of gRPC: what they gain is shown by `kvgrpc bench pull --parts rate`, and a version that
does not know one says so on standard error and goes on.
"""


def poll_in_place(environment: MutableMapping[str, str]) -> None:
    """Before gRPC is imported; what the operator has set stays, even if it is empty."""
    environment.setdefault(VARIABLE, IN_PLACE)
