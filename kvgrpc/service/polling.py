"""Setting for gRPC's wait on its sockets, in a process that is only a server.

gRPC reads the variable when it is imported, so nothing here imports gRPC. In a process that embeds a server, the owner
may call this first, or set the variable.
"""

from collections.abc import MutableMapping

VARIABLE = "GRPC_EXPERIMENTS"
IN_PLACE = "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"
"""Value that makes gRPC read a socket in the thread that waits for its events, not in a pool thread that it wakes. The
names belong to one version of gRPC: `python -m bench pull --parts rate` shows the gain. A version that does not know a
name says so on standard error and goes on.
"""


def poll_in_place(environment: MutableMapping[str, str]) -> None:
    """Sets the variable before gRPC is imported, unless the operator has set it, even to an empty value."""
    environment.setdefault(VARIABLE, IN_PLACE)
