"""Pool: blocks that this server gives out itself, and blocks in quarantine.

Which blocks are pinned, and why, is in `tables.pins`.
"""
