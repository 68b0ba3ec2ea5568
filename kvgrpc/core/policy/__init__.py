"""Policy: decides for a scheduler about KV that is elsewhere.

The policy knows prompts, tokens and blocks; transfers and leases are the node's.
"""
