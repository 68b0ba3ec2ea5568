"""Policy: what a scheduler decides about KV that is somewhere else.

It knows prompts, tokens and blocks; transfers and leases are the node's.
"""
