"""The lead's shell: gRPC and sessions on one side, the node on the other. Knows no data path.

A method is convert, call, convert. Decisions are the node's; the only clock is read by `runner`.
"""
