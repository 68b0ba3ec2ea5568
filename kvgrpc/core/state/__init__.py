"""State: all that a node knows, in one object, and the rows that name events and actions.

Tables that know neither are in `tables`; what changes all these is in the rooms above.
"""

from kvgrpc.core.state.node_state import NodeState

__all__ = ["NodeState"]
