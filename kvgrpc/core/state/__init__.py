"""State: one object with all that a node knows, and the rows that refer to events and actions.

Tables that refer to neither are in `tables`. The code that changes the state is in the rooms above.
"""

from kvgrpc.core.state.node_state import NodeState

__all__ = ["NodeState"]
