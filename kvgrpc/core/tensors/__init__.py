"""Named tensors at a lead: which ones are here and where, who waits for them, and which come too late.

This room knows no others but values and tables, as the policy does: events and time go in, effects come out. It moves
nothing. The shell asks the node to move tensors, and reports how that went.
"""
