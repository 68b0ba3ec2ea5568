"""Named tensors at a lead: what they are, which are here and where, who waits for them, and which come too late.

A room apart from all others but values and tables, as the policy is: events and time in, effects out. It moves nothing:
the shell asks the node to, and tells how that went.
"""
