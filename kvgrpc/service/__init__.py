"""The lead's shell: gRPC and sessions on one side, the node on the other. The shell knows no data path.

A method converts, calls, converts. Decisions are the node's. Only `runner` reads the clock.
"""
